// What launches take on the chip, for programs that time them with events.
//
// The cost model's times are put together in Python (jitfmha/emulator/estimate.py). A program that
// `python -m jitfmha run-program` runs has two pipes to it, whose numbers are in the environment.
#pragma once

#include <string>

namespace emulator {

// Whether launches of this process have times.
bool clock_runs();
// Seconds of all launches that have ended.
double clock_now();
// Asks for the time of a launch, whose profile is one line of JSON, and puts the clock forward.
void put_clock_forward(const std::string& profile);

}  // namespace emulator
