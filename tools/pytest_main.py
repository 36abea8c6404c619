"""Entry point of the py_test targets: runs pytest on the files in the arguments."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
