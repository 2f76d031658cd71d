"""How sources become a library or a code object: host C++ and device HIP, by one protocol."""
