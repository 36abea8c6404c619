"""What mf-plan prints to go on with: commands that make, train and aggregate what it chose."""

import dataclasses
import math
import pathlib
import re
import shlex

import pytest

import mf_aggregators as mfa
from mf_aggregators import checkpoints, planning
from mf_aggregators.commands import plan as plan_command
from mf_aggregators.participation import Sampler, SamplingScheme
from simulations.runs import run_plan
from tests.mf_aggregators.commands.small_plans import (
    DRAWN_BY_POISSON,
    SETTING,
    arguments_of,
    call_plan,
    fields_of_plan,
    file_of_weights,
    options_of_run,
    run_factorize,
    run_lines,
)


@pytest.mark.short_cases(3)
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--separation=3", "--max_participations=4"),
        ("--num_rounds=4",),
        ("--separation=4", "--noise_memory_gb=0"),
        DRAWN_BY_POISSON,
        ("--sampling=fixed_size", "--num_rounds=1"),
        ("--sampling=shuffling", "--num_rounds=8"),
    ],
    ids=" ".join,
)
def test_printed_commands_run(
    cache: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = fields_of_plan(cache, *arguments)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    make, *run, aggregator = fields["commands"]

    words = shlex.split(make)
    if chosen["amplified"]:
        assert words[0] == "mf-plan"
        assert call_plan(*words[1:], cache)[0] == 0
    else:
        assert words[0] == "mf-factorize"
        run_factorize(words)
    directory, named = arguments_of(aggregator)
    mechanism = mfa.load(directory)
    workload = mfa.workloads.prefix_sum(mechanism.num_rounds)
    # What is made is what was compared, up to the gap that the plan is content with.
    found = mechanism.factorization.rmse(workload, mechanism.noise_reference)
    assert found == pytest.approx(chosen["rmse"], rel=1e-3)
    assert mechanism.noise_multiplier == chosen["noise_multiplier"]
    assert str(mechanism.noise_reference) == chosen["participation"]
    scheme = mechanism.sampling
    assert (None if scheme is None else scheme.to_dict()) == chosen["sampling"]
    assert mechanism.guarantee(1.5e-6).epsilon <= 7.123456789
    assert (named["clip_norm"], named["clients_per_round"]) == (1.0, 10)
    assert [step["command"] for step in fields["steps"][:-1]] == [make, *run]
    assert [step["is_template"] for step in fields["steps"]] == [False, *(True for _ in run), False]

    if not run:
        assert not chosen["amplified"]
        assert isinstance(mechanism.noise_reference, mfa.participation.FixedEpochOrder)
        return
    words = shlex.split(run[0])
    assert words[0] == "run-stackoverflow"
    options = options_of_run(words)
    # The guarantee is that of the plan, to the last digit, and nothing says it twice.
    assert options["noise_multiplier"] == mechanism.noise_multiplier
    assert (options["target_epsilon"], options["delta"]) == (None, 1.5e-6)
    said = {word.partition("=")[0] for word in words[1:]}
    assert said <= {"--dataset", "--checkpoint", "--clients_per_round", "--delta"}
    assert options["clients_per_round"] == 10
    # Nobody knows the best rates for somebody's data: none is printed, and it is said.
    assert "--dataset=YOUR_DATASET" in words
    assert not any("learning_rate" in word for word in words)
    assert "A template" in fields["steps"][1]["notes"][0]
    loaded, _ = run_plan._loaded(options)
    if chosen["amplified"]:
        scheme = run_plan.scheme_of(options, 40, loaded)
        assert (scheme.name, scheme.num_bands) == (fields["sampling"], chosen["num_bands"])
        assert scheme == mechanism.sampling
    else:
        schema = mfa.participation.MinSeparation(
            options.separation or 0, options.max_participations
        )
        assert schema == mechanism.noise_reference


@pytest.mark.long_cases(2)
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--error=max",),
        ("--error=WEIGHTS",),
        ("--error=max", "--sampling=poisson", "--mechanisms=banded"),
    ],
    ids=" ".join,
)
def test_printed_commands_make_the_very_matrix_of_an_error(
    cache: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    error = arguments[0].removeprefix("--error=")
    if error == "WEIGHTS":
        error = file_of_weights(tmp_path, 12)
        arguments = (f"--error={error}", *arguments[1:])
    own = fields_of_plan(cache, *arguments, "--output=own")
    fields = fields_of_plan(cache, *arguments)
    assert fields["candidates"] == own["candidates"]
    assert fields["error"] == error
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    assert chosen["mechanism"] == "structured" or chosen["options"]["error"] == error
    made = checkpoints.load("own")
    *commands, aggregator = fields["commands"]
    for command in commands:
        words = shlex.split(command)
        if words[0] == "mf-factorize":
            run_factorize(words)
        elif words[0] == "mf-plan":
            call_plan(*words[1:], f"--cache_dir={tmp_path / 'new'}").done()
    found = mfa.load(arguments_of(aggregator)[0])
    assert found == mfa.load("own")
    # A matrix for the mean is another one.
    of_mean = fields_of_plan(cache, *arguments[1:], "--output=of_mean")
    assert of_mean["error"] == "mean"
    assert not checkpoints.load("of_mean").has_same_matrix(made)
    assert run_lines(aggregator)["aggregator"].mechanism == found
    assert found.factorization.has_same_matrix(made)
    assert found.noise_multiplier == chosen["noise_multiplier"]
    errors = made.errors(mfa.workloads.prefix_sum(made.num_rounds), found.noise_reference)
    assert chosen["max_error"] == pytest.approx(errors.max_error, rel=1e-12)
    sought = errors.max_error
    if error != "max":
        weights = [float(line) for line in pathlib.Path(error).read_text().split()]
        sought = math.sqrt(
            sum(w * e for w, e in zip(weights, errors.per_round_variance, strict=True))
            / sum(weights)
        )
    assert chosen["effective_error"] == pytest.approx(
        sought * chosen["noise_multiplier"] / 10, rel=1e-12
    )


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("sampling", "condition"),
    [
        ("min_separation", r"takes part with probability [\d.]+, by a secret coin of its own"),
        (
            "balls_in_bins",
            r"is put into one of 4 bins, each as likely as the others, independently",
        ),
    ],
)
def test_plans_of_clients_that_draw_for_themselves(
    cache: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: str,
    condition: str,
) -> None:
    """The plan itself writes the certified matrix; the aggregator says what must draw."""
    monkeypatch.chdir(tmp_path)
    arguments = (f"--sampling={sampling}", "--num_rounds=6", "--delta=1e-3")
    fields = fields_of_plan(cache, *arguments)
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    assert not chosen["is_estimate"]
    again, run, aggregator = (step["command"] for step in fields["steps"])
    words = shlex.split(again)
    assert words[0] == "mf-plan"
    made = call_plan(*words[1:], cache, "--format=json").fields()
    assert made["recommended"] == fields["recommended"]
    mechanism = mfa.load(arguments_of(aggregator)[0])
    scheme = SamplingScheme.from_dict(chosen["sampling"])
    assert mechanism.sampling == scheme
    assert scheme.name == sampling
    options = options_of_run(shlex.split(run))
    assert run_plan.scheme_of(options, 40, mechanism.factorization) == scheme
    assert options["noise_multiplier"] == mechanism.noise_multiplier
    stated = mechanism.guarantee(1e-3)
    assert stated.epsilon <= 7.123456789
    (note,) = (note for note in fields["steps"][-1]["notes"] if "only if" in note)
    assert re.search(condition, note)
    assert f"mfa.participation.{scheme!r}" in fields["steps"][-1]["sampler"]
    out = call_plan(*SETTING, *arguments, cache).done()
    marked = [line for line in out.splitlines() if "~" in line]
    assert any("rough estimates, for which no guarantee holds" in line for line in marked)
    assert not any(line.startswith("*") for line in marked)


def test_the_aggregator_is_made(cache: str, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "it's a plan"
    fields = fields_of_plan(cache, f"--output={output}")
    *run, aggregator = fields["commands"]
    # What --output wrote needs no mf-factorize.
    assert [shlex.split(command)[0] for command in run] == ["run-stackoverflow"]
    assert shlex.split(run[0])[2] == f"--checkpoint={output}"
    made = run_lines(aggregator)
    assert made["aggregator"].mechanism == made["mechanism"] == mfa.load(output)
    assert made["mechanism"].noise_multiplier == fields["candidates"][0]["noise_multiplier"]
    assert made["mechanism"].num_rounds == 12


@pytest.mark.short_cases(1)
@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--separation=3",), ("timers", "at least 3 rounds apart", "every device")),
        (
            ("--sampling=poisson", "--num_rounds=12", "--population=30"),
            ("all clients in one fixed order of 3 batches", "4 times at most"),
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_the_guarantee_depends_on_stands_with_the_aggregator(
    cache: str, arguments: tuple[str, ...], phrases: tuple[str, ...]
) -> None:
    fields = fields_of_plan(cache, *arguments)
    text = call_plan(*SETTING, *arguments, cache).done()
    lines = text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("  mechanism = mfa.load("))
    first = max(i for i in range(at) if not lines[i])
    above = lines[first + 1 : at]
    assert all(line.startswith("  # ") for line in above)
    printed = " ".join(line.removeprefix("  # ") for line in above)
    # A script that takes the command alone, and one that reads the steps, see it as well.
    for said in (printed, fields["commands"][-1], " ".join(fields["steps"][-1]["notes"])):
        for phrase in ("(7.12346, 1.5e-06)-DP only if", *phrases):
            assert phrase in said
    arguments_of(fields["commands"][-1])


@pytest.mark.long
@pytest.mark.short_cases(1)
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffling"])
def test_an_amplified_guarantee_names_the_sampler_that_has_to_draw(
    cache: str, sampling: str
) -> None:
    """The sampler is evaluated as printed, and is of the scheme that was amplified."""
    import simulations

    plan_of_four_rounds = planning.make(
        planning.Setting(
            num_rounds=4,
            population=45,
            clients_per_round=10,
            participation=None,
            sampling=sampling,
            epsilon=7.1234511,
            delta=1e-6,
            model_size=1000,
        ),
        cache_directory=pathlib.Path(cache.removeprefix("--cache_dir=")),
    )
    amplified = [
        each for each in plan_of_four_rounds.candidates if each.mechanism.sampling is not None
    ]
    assert len(amplified) == 3
    for candidate in amplified:
        chosen = dataclasses.replace(plan_of_four_rounds, recommended=candidate)
        step = plan_command._steps(chosen, "directory", "mf-plan", {})[-1]
        assert step.sampler is not None
        sampler = eval(step.sampler, {"mfa": mfa, "simulations": simulations})
        assert isinstance(sampler, Sampler)
        drawn = sampler.scheme
        assert drawn == candidate.mechanism.sampling
        again = eval(step.sampler, {"mfa": mfa, "simulations": simulations})
        assert sampler.seed != again.seed
        alone = step.alone()
        for said in (alone, " ".join(line.removeprefix("# ") for line in step.lines())):
            # Rounded up.
            assert f"(7.12346, 1e-06)-DP only if this holds. {drawn.words.assumption}" in said
            assert step.sampler in said
            assert "stay secret" in said
        arguments_of(alone)
        # A call without the limit may choose, and write, another mechanism.
        limited = dataclasses.replace(chosen, skipped={"optimal": "takes long"})
        first, *_, last = plan_command._steps(limited, "directory", "mf-plan", {})
        assert "With --output= and --time_limit=" in " ".join(first.notes)
        for loaded in amplified:
            assert last.sampler is not None
            found = eval(last.sampler, {"mfa": mfa, "mechanism": loaded.mechanism})
            assert found.scheme == loaded.mechanism.sampling
        assert repr(drawn) not in " ".join(last.notes)


@pytest.mark.long
def test_an_approximation_is_printed_with_what_it_approximates(
    cache: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # 16 rows of noise for 120 rounds, where clients return after 40.
    sizes = ("--num_rounds=120", "--population=400", "--noise_memory_gb=6.4e-5")
    fields = fields_of_plan(cache, *sizes)
    assert fields["recommended"] == "structured"
    (chosen,) = (candidate for candidate in fields["candidates"] if candidate["recommended"])
    base, own, run, aggregator = fields["commands"]
    for command in (base, own):
        run_factorize(shlex.split(command))
    directory, _ = arguments_of(aggregator)
    assert f"--checkpoint={directory}" in shlex.split(run)
    made = mfa.load(directory)
    found = made.factorization.rmse(mfa.workloads.prefix_sum(120), made.noise_reference)
    assert found == pytest.approx(chosen["rmse"], rel=2e-3)


def test_searches_and_their_run_together_keep_the_target(
    cache: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    share = ("--clip_norm_share=0.05", "--rate_share=0.1", "--mechanisms=toeplitz")
    fields = fields_of_plan(cache, *share)
    run_factorize(shlex.split(fields["commands"][0]))
    *_, lines = fields["steps"]
    assert ["norms_of" in note for note in lines["notes"]] == [False, True, False, False]
    made, search, _, short, best, _ = lines["command"].splitlines()
    assert "found.clip_norm" in best
    found = run_lines(f"{made}\n{search}\n{short}")
    together = (found["mechanism"], found["search"], *found["short"])
    assert len(together) == 2 + 5
    events = [each.event() for each in together]
    assert 7.1 < mfa.accounting.composed_epsilon(events, 1.5e-6) <= 7.123456789
    assert found["mechanism"].guarantee(1.5e-6).epsilon < 7.0
    for refused in ("--clip_norm_share=0.9", "--sampling=poisson"):
        call_plan(*SETTING, cache, *share, refused).refused("--clip_norm_share")
    out = call_plan(*SETTING, cache, "--mechanisms=toeplitz,optimal", "--may_extend_to=20").done()
    assert "epsilon of 20" in out
    assert "  optimal" not in out.partition("Infeasible")[0]
    words = ("--workload=momentum_sgd", "--momentum=0.8", "--mechanisms=toeplitz")
    fields = fields_of_plan(cache, *words)
    make, run, _ = fields["commands"]
    assert {"--workload=momentum_sgd", "--momentum=0.8"} <= set(shlex.split(make))
    assert "--server_momentum=0.8" in shlex.split(run)
    assert fields["workload"] == {"workload": "momentum_sgd", "momentum": 0.8}
