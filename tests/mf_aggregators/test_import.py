"""The mathematics imports where TensorFlow is not installed."""

import subprocess
import sys

_PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("tensorflow"):
            raise ImportError(name)
        return None

sys.meta_path.insert(0, Refuse())
import mf_aggregators as mfa
from mf_aggregators.commands import factorize, report
factorization = mfa.factorizations.banded(mfa.workloads.prefix_sum(8), 2)
assert mfa.accounting.epsilon(1.0, 1e-6) > 0
assert "mf_dp_aggregator" in dir(mfa)
assert not [name for name in sys.modules if name.startswith("tensorflow")]
try:
    mfa.mf_dp_aggregator
except ImportError:
    print("refused")
"""


def test_everything_but_the_aggregator_imports_without_tensorflow() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert finished.stdout == "refused\n"


def test_plain_imports_need_no_matplotlib_and_figures_no_tensorflow() -> None:
    program = (
        "import sys, mf_aggregators; from mf_aggregators.commands import report; "
        "mf_aggregators.factorizations.identity(3); "
        "assert not [m for m in sys.modules if m.startswith('matplotlib')]; "
        "from mf_aggregators import figures; "
        "assert 'matplotlib.pyplot' not in sys.modules; "
        "assert not [m for m in sys.modules if m.startswith('tensorflow')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
