"""What is raised where a process refuses a round, out of what TFF raises."""

import ast
import asyncio
import pathlib
from typing import Any

import pytest

import mf_aggregators
from mf_aggregators.tff import processes
from tests.refusals import refuses

_LIBRARY = pathlib.Path(mf_aggregators.__file__).parent
_MESSAGE = 'It\'s "refused" (the record is in C:\\a [1] b/[2]).'


class _WorkerError(Exception):
    """As gRPC prints it."""

    def __init__(self, message: str) -> None:
        escaped = message.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
        super().__init__(
            '<RPC that terminated with:\n\tdetails = "Failed to run computation: assertion failed: '
            f"[{escaped}] [Condition x < y did not hold element-wise:] [x = ] [1]\n\t [[{{node}}]]"
        )


class _Context:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def invoke(self, computation: Any, argument: Any) -> Any:
        if self.error is not None:
            raise self.error
        return computation, argument


class _AsyncContext(_Context):
    async def invoke(self, computation: Any, argument: Any) -> Any:
        return super().invoke(computation, argument)


def _invoked(context: Any) -> Any:
    found = context.invoke("next", 1)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


@pytest.mark.parametrize("kind", [_Context, _AsyncContext])
def test_a_context_raises_what_is_refused_in_one_line_and_all_else_as_it_is(kind: Any) -> None:
    of_others = _WorkerError("Labels must be below 10.")
    for error in (of_others, KeyError("x"), _WorkerError("")):
        context = kind(error)
        processes.raise_refusals(context)
        with pytest.raises(type(error)) as raised:
            _invoked(context)
        assert raised.value is error
    context = kind(None)
    processes.raise_refusals(context)
    assert _invoked(context) == ("next", 1)
    context = kind(_WorkerError(processes.refusal(_MESSAGE)))
    for _ in range(3):
        processes.raise_refusals(context)
        with pytest.raises(processes.RefusalError) as refused:
            _invoked(context)
        assert str(refused.value) == _MESSAGE
        assert refused.value.__suppress_context__
        # One wrapper, however often an aggregator is made.
        assert [entry.name for entry in refused.traceback].count("_clear_errors") == 1


@pytest.mark.parametrize("kind", [_Context, _AsyncContext])
def test_a_context_without_a_secure_sum_says_which_one_simulates_it(kind: Any) -> None:
    context = kind(ValueError('details = "Cannot embed a federated value. while evaluating"\n'))
    processes.raise_refusals(context)
    with refuses("set_sync_test_cpp_execution_context", error=processes.RefusalError) as refused:
        _invoked(context)
    assert "\n" not in str(refused.value)


def test_a_context_whose_methods_are_fixed_is_left_as_it_is() -> None:
    class _Fixed:
        __slots__ = ()

        def invoke(self, computation: Any, argument: Any) -> Any:
            raise _WorkerError(processes.refusal(_MESSAGE))

    context = _Fixed()
    processes.raise_refusals(context)
    with pytest.raises(_WorkerError) as raised:
        _invoked(context)
    # Whoever runs it finds the reason, whole.
    assert processes.refusal_of(raised.value) == _MESSAGE
    assert processes.refusal_of(processes.RefusalError("Why.")) == "Why."
    assert processes.refusal_of(ValueError("another error")) is None


def test_every_check_in_a_graph_says_what_is_refused() -> None:
    """Its message is one that contexts know: no check of the library is left out."""
    checks = [
        (path.name, each)
        for path in sorted(_LIBRARY.rglob("*.py"))
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.Call) and ".debugging." in f".{ast.unparse(each.func)}"
    ]
    assert len(checks) >= 5
    for name, check in checks:
        (message,) = [each.value for each in check.keywords if each.arg == "message"]
        assert isinstance(message, ast.Call), name
        assert ast.unparse(message.func) == "processes.refusal", name
