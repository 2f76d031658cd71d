"""What a launch takes by its cycles, where power limits the clock.

``python -m jitfmha export`` translates this module to C++, so it keeps to the Python that
``jitfmha/export/translation.py`` knows.
"""

from __future__ import annotations

from typing import NamedTuple


class ClockSpeed(NamedTuple):
    """What limits the clock of a chip.

    Attributes:
        peak: in Hz.
        cycle: seconds of a cycle without matrix work, if the peak did not limit the clock.
        cycle_of_matrix_work: seconds that a cycle takes longer where matrix units are always busy.
    """

    peak: float
    cycle: float
    cycle_of_matrix_work: float

    def seconds(self, cycles: float, matrix_cycles: float) -> float:
        """Of so many cycles, in so many of which the matrix units are busy; by power, or peak."""
        limited = cycles * self.cycle + matrix_cycles * self.cycle_of_matrix_work
        return max(cycles / self.peak, limited)
