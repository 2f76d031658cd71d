"""The virtual node: the chips that are emulated."""

VIRTUAL_NODE = {"gfx942": "MI300X", "gfx942-mi308": "MI308X", "gfx950": "MI355X"}
"""What `emulate` accepts -> the chip that it is, in the order of the device numbers."""
