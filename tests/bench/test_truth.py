"""In real time: AU on a simulated storage of known bandwidth, beside the value by hand.

The exact comparison is on a virtual clock (test_loop.py); the figures are the benchmark's
(bench_parts/truth.py). Here a busy machine must not fail, and a link that idles between reads must.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.bench_parts.truth import SETTINGS, Setting, truth


def test_a_setting_by_hand():
    # One accelerator, 0.1 s of transfers for each step of 0.05 s: 50 %, as each step waits alike.
    assert Setting(1, 4, 0.05, 0.5).hand_percent() == pytest.approx(50)
    assert Setting(1, 4, 0.05, 2.0).hand_percent() == pytest.approx(100)
    # Two, 3 steps: 0.2 s in 0.4 s, and 0.1 s more for the first that waits at the first barrier.
    two = Setting(2, 1, 0.1, 0.5, steps=3)
    assert two.hand_percent() == pytest.approx(50 * (0.2 / 0.5 + 0.2 / 0.4))
    assert len({(s.step_s, s.batch, s.share, s.accelerators) for s in SETTINGS}) == 20


@pytest.mark.slow
def test_au_is_the_value_by_hand_in_real_time(tmp_path):
    rows = truth(tmp_path)
    off = sorted(abs(row.off_percent) for row in rows)
    assert len(off) == 20
    assert off[10] < 1, rows
    assert off[-1] < 25, rows
