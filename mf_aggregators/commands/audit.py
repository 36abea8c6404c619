r"""mf-audit: attacks a mechanism in real rounds and bounds its epsilon from below.

It runs the aggregator with real noise on neighbouring inputs. The exit status is 0 if the lower
bound on epsilon does not exceed the claimed epsilon, 1 if it does, 2 for wrong flags or input, and
70 for a fault of the program itself.

Examples:
  mf-audit --mechanism=blt --num_rounds=8 --separation=3
  mf-audit --checkpoint=banded_64 --target_epsilon=8 --canaries=8000
  mf-audit --checkpoint=mechanism_in_bins --noise_multiplier=0.5
"""

import dataclasses
import math
import sys
import time
from collections.abc import Sequence

from absl import flags

from mf_aggregators import audit, catalogue, checkpoints, inputs, workloads
from mf_aggregators import participation as participations
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.aggregator import Aggregator
from mf_aggregators.audit import statistics
from mf_aggregators.audit.adaptive_clipping import MOST_ROUNDS, ClippingResult, audit_clipping
from mf_aggregators.audit.bits import BitsResult, audit_bits
from mf_aggregators.commands import command_line, mechanism_flags
from mf_aggregators.commands.command_line import CommandError, FlagGroup
from mf_aggregators.kernel.numbers import pair, rounded_up
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Participation, SingleParticipation

# With this noise multiplier, wrong guesses are rare enough for a large bound and frequent enough to
# be counted.
_NOISE_MULTIPLIER = 1.0 / 3.0
_NUM_ROUNDS = 8
_CLIP_NORM = 1.0
_CLIENTS_PER_ROUND = 100
# Clipped-count indicators then have 83 % of the squared mu, so that attacks on them succeed.
_COUNT_STDDEV_OVER_MULTIPLIER = 0.55
# If an audit reaches a smaller share of the claimed epsilon, the verdict says so.
_SHARE_THAT_TELLS = 0.7


def _define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of mf-audit."""
    group = FlagGroup(values, "Mechanism")
    group.choice(
        "mechanism",
        list(catalogue.ENTRIES),
        "The mechanism to audit, for prefix sums. Required, unless --checkpoint is given.",
    )
    group.path(
        "checkpoint",
        "A checkpoint directory to audit, in place of --mechanism. A Mechanism with a sampling "
        "scheme is audited with its own noise, against an attacker who does not know the draws, "
        "unless --participation or --separation names a schema.",
    )
    group.require("mechanism", "checkpoint")
    group.integer("num_rounds", f"The number of rounds of --mechanism. Default: {_NUM_ROUNDS}.")
    group = FlagGroup(values, "Audit")
    group.integer(
        "canaries",
        "The number of audited clients over all runs: more of them give a larger bound and take "
        "longer.",
        4000,
    )
    group.number(
        "false_alarm_rate",
        "The largest probability of reporting a violation if the mechanism keeps its claim.",
        1e-4,
    )
    group.boolean(
        "adaptive_clip",
        "Whether the clip norm adapts; the clipped-count indicators are then attacked as well.",
        False,
    )
    group.choice(
        "backend",
        ["tff", "numpy"],
        "The implementation to audit: TensorFlow Federated, or NumPy, which releases the same bits "
        "in a sixth of the time. Default: tff if it is installed.",
    )
    mechanism_flags.define(values, "privacy", "participation")
    group = FlagGroup(values, "Noise")
    group.choice(
        "noise_storage",
        ["auto", "state", "disk"],
        "Where the aggregator keeps the noise of earlier rounds. auto: the cheaper one that fits.",
        "auto",
    )
    mechanism_flags.define(values, "options")


def _main(values: flags.FlagValues) -> int:
    """Audits and reports; returns the exit status."""
    start = time.monotonic()
    backend = _backend(values)
    mechanism = _audited(values)
    audited = _audit_of_a_schema if mechanism.sampling is None else _audit_drawn
    exceeded, fields, verdict = audited(values, mechanism)
    common = {
        "mechanism": mechanism.factorization.mechanism,
        "backend": backend,
        "num_rounds": mechanism.num_rounds,
        "participation": str(mechanism.participation),
        "noise_multiplier": mechanism.noise_multiplier,
        "exceeded": exceeded,
    }
    fields = {**common, **fields, "seconds": time.monotonic() - start}
    text = f"{command_line.table(list(fields.items()))}\n\n{verdict}"
    command_line.print_result(values, fields, text)
    return command_line.REFUTED if exceeded else command_line.DONE


def _audit_of_a_schema(
    values: flags.FlagValues, mechanism: Mechanism
) -> tuple[bool, dict[str, object], str]:
    """Audits clients under a schema: returns whether the claim is refuted, fields, a verdict."""
    command_line.check_choice(
        not values.adaptive_clip or mechanism.num_rounds <= MOST_ROUNDS,
        f"--adaptive_clip is for at most {MOST_ROUNDS} rounds, found {mechanism.num_rounds}: "
        "audit a factorization of the same kind for fewer rounds.",
    )
    claim = audit.Claim(mechanism, _CLIP_NORM, _CLIENTS_PER_ROUND)

    def build(adaptive: AdaptiveClip) -> object:
        clip: float | AdaptiveClip = adaptive if values.adaptive_clip else _CLIP_NORM
        return _aggregator(values, mechanism, clip, _CLIENTS_PER_ROUND)

    rate = statistics.checked_false_alarm_rate(values.false_alarm_rate)
    rate /= 3.0 if values.adaptive_clip else 2.0
    result = audit.audit(
        lambda: build(AdaptiveClip(_CLIP_NORM, update_period=1)),
        claim,
        delta=values.delta,
        canaries=values.canaries,
        false_alarm_rate=rate,
        show_progress=True,
    )
    # The attack on bits is only for constant clip norms.
    bits = audit_bits(
        lambda: build(AdaptiveClip(_CLIP_NORM, learning_rate=0.0)),
        claim,
        false_alarm_rate=rate,
        show_progress=True,
    )
    clipping = None
    if values.adaptive_clip:
        deviation = _COUNT_STDDEV_OVER_MULTIPLIER * mechanism.noise_multiplier
        clip = AdaptiveClip(_CLIP_NORM, update_period=1, clipped_count_stddev=deviation)
        clipping = audit_clipping(
            Aggregator(mechanism, clip, _CLIENTS_PER_ROUND),
            claim,
            trials=max(1, values.canaries // 2),
            false_alarm_rate=rate,
            show_progress=True,
        )
    found: list[audit.AuditResult | BitsResult | ClippingResult] = [result, bits]
    if clipping is not None:
        found.append(clipping)
    false_alarm_rate = sum(each.false_alarm_rate for each in found)
    rates = result.rates[0]
    fields: dict[str, object] = {
        "delta": result.delta,
        "epsilon": result.epsilon,
        "epsilon_lower_bound": result.epsilon_lower_bound,
        "ratio": result.ratio,
        "epsilon_of_a_perfect_attack": result.epsilon_of_a_perfect_attack,
        "mu": claim.mu,
        "mu_lower_bound": result.mu_lower_bound,
    }
    for bound in result.any_mechanism:
        at = "" if bound.delta == result.delta else f"_at_delta_{bound.delta:g}"
        if at:
            fields[f"epsilon{at}"] = bound.epsilon
        fields[f"epsilon_lower_bound_any_mechanism{at}"] = bound.epsilon_lower_bound
    fields |= {
        "audited_rounds": " ".join(str(i + 1) for i in result.contribution.rounds),
        "canaries": rates.presences,
        "false_negatives": rates.false_negatives,
        "absences": rates.absences,
        "false_positives": rates.false_positives,
        "guesses_from_bits": bits.trials,
        "right_guesses_from_bits": bits.right,
        "right_guesses_allowed": bits.largest_right,
    }
    if clipping is not None:
        fields |= {
            "mu_lower_bound_with_bits_of_clients": clipping.mu_lower_bound,
            "runs_with_bits_of_clients": clipping.rates.presences,
        }
    fields["false_alarm_rate"] = false_alarm_rate
    verdict = _verdict(result, bits, clipping, false_alarm_rate)
    return any(each.exceeded for each in found), fields, verdict


def _backend(values: flags.FlagValues) -> str:
    """The name of the backend, after a check that it is installed."""
    if values.backend == "numpy":
        return "numpy"
    try:
        command_line.check_extra("an audit with --backend=tff")
    except CommandError:
        if values.backend is None:
            return "numpy"
        raise
    return "tff"


def _aggregator(
    values: flags.FlagValues, mechanism: Mechanism, clip: float | AdaptiveClip, clients: float
) -> object:
    """The aggregator that is attacked."""
    if _backend(values) == "numpy":
        storage = "state" if values.noise_storage == "auto" else values.noise_storage
        return Aggregator(mechanism, clip, clients, noise_storage=storage)
    # The import takes seconds, so flags are checked before it.
    _import_tff()
    from mf_aggregators.tff.aggregator import mf_dp_aggregator

    return mf_dp_aggregator(
        mechanism,
        clip_norm=clip,
        clients_per_round=clients,
        noise_storage=values.noise_storage,
    )


def _audit_drawn(
    values: flags.FlagValues, mechanism: Mechanism
) -> tuple[bool, dict[str, object], str]:
    """Audits drawn clients: returns whether the claim is refuted, fields, and a verdict."""
    command_line.check_choice(
        not values.adaptive_clip,
        "--adaptive_clip needs clients that keep to a schema: name the schema by --participation.",
    )
    scheme = mechanism.sampling
    assert scheme is not None
    result = audit.audit_drawn(
        lambda: _aggregator(values, mechanism, _CLIP_NORM, scheme.clients_per_round),
        mechanism,
        clip_norm=_CLIP_NORM,
        clients_per_round=scheme.clients_per_round,
        delta=values.delta,
        canaries=values.canaries,
        false_alarm_rate=values.false_alarm_rate,
        show_progress=True,
    )
    fields: dict[str, object] = {}
    for bound, rates in zip(result.bounds, result.rates, strict=True):
        at = f"_at_delta_{bound.delta:g}"
        fields |= {
            f"epsilon{at}": bound.epsilon,
            f"epsilon_lower_bound{at}": bound.epsilon_lower_bound,
            f"false_negatives{at}": rates.false_negatives,
            f"false_positives{at}": rates.false_positives,
        }
    fields |= {
        "canaries": result.rates[0].presences,
        "absences": result.rates[0].absences,
        "false_alarm_rate": result.false_alarm_rate,
    }
    worst = max(result.bounds, key=lambda each: each.epsilon_lower_bound - each.epsilon)
    last = result.bounds[-1]
    share = math.floor(100.0 * last.epsilon_lower_bound / last.epsilon) if last.epsilon else 0
    verdict = (
        f"No violation of {pair(last.epsilon, last.delta)}-DP found, as amplified by "
        f"{scheme.name}, by an attack that reached {share} % of epsilon."
    )
    if result.exceeded:
        verdict = _violated(
            f"an attacker who does not know the draws learns more than ({worst.epsilon!r}, "
            f"{worst.delta!r})-DP allows, as amplified by {scheme.name}: epsilon is at least "
            f"{worst.epsilon_lower_bound!r}",
            result.false_alarm_rate,
        )
    return result.exceeded, fields, verdict


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      argv: The command line with the program's name first; that of the process by default.
    """
    return command_line.run(__doc__ or "", _define_flags, _main, argv)


def _violated(found: str, false_alarm_rate: float) -> str:
    return (
        f"VIOLATED: {found} (the probability of this verdict on a mechanism that keeps its claim "
        f"is at most {rounded_up(false_alarm_rate, '.6g')})."
    )


def _verdict(
    result: audit.AuditResult,
    bits: BitsResult,
    clipping: ClippingResult | None,
    false_alarm_rate: float,
) -> str:
    multiplier = f"noise multiplier {result.claim.mechanism.noise_multiplier!r}"
    found = ""
    if clipping is not None and clipping.exceeded:
        found = (
            f"updates and their clipped-count indicators together reveal more than {multiplier} "
            f"allows: mu is at least {clipping.mu_lower_bound!r}, and {clipping.claim.mu!r} is "
            "claimed"
        )
    elif bits.exceeded:
        found = (
            f"the bits of the releases reveal whether a client took part: {bits.right} of "
            f"{bits.trials} guesses were right, and {multiplier} allows {bits.largest_right}"
        )
    elif result.exceeded:
        # Epsilon is printed with all digits, because the lower bound might not exceed a rounded
        # one.
        claim = f"({result.epsilon!r}, {result.delta!r})-DP"
        found = f"an attacker learns more than {claim} of {multiplier} allows"
    if found:
        return _violated(found, false_alarm_rate)
    claim = f"No violation of {pair(result.epsilon, result.delta)}-DP found"
    share = f"{math.floor(100.0 * result.ratio)} % of epsilon"
    if result.ratio < _SHARE_THAT_TELLS:
        return (
            f"{claim}, but the attack reached only {share}: use more canaries, or a smaller noise "
            "multiplier."
        )
    return f"{claim}, by an attack that reached {share}."


def _import_tff() -> None:
    """Imports TensorFlow Federated, and lets its worker end with this process."""
    from mf_aggregators.tff import processes

    processes.prepare_environment()
    # The last registered exit handler runs first, so ours runs before those of TFF.
    import tensorflow_federated  # noqa: F401

    processes.end_workers_at_exit()


def _audited(values: flags.FlagValues) -> Mechanism:
    """The mechanism that the flags name."""
    command_line.check_choice(
        values.checkpoint is None or values.mechanism is None,
        "--checkpoint and --mechanism exclude each other: give one.",
    )
    schema = mechanism_flags.participation(values)
    options = mechanism_flags.given_options(values.flag_values_dict(), values.mechanism)
    own_multiplier = _NOISE_MULTIPLIER
    if values.checkpoint is not None:
        command_line.check_choice(
            values.num_rounds is None, "--num_rounds is set by the checkpoint: leave it out."
        )
        saved = mechanism_flags.saved_mechanism(values.checkpoint)
        if schema is None and saved is not None and saved.sampling is not None:
            return _drawn(values, saved)
        if saved is not None:
            schema = schema or saved.noise_reference
            own_multiplier = mechanism_flags.noise_under(saved, schema)
        factorization, description = checkpoints.load_with_description(values.checkpoint)
        schema = schema or Participation.from_dict(
            inputs.part(description, dict, "errors", "participation")
        )
    else:
        num_rounds = _NUM_ROUNDS if values.num_rounds is None else values.num_rounds
        # Also refuses impossible numbers of rounds before a search begins.
        workload = workloads.Workload.described({"name": "prefix_sum"}, num_rounds)
        if schema is not None:
            participations.check(schema, num_rounds)
        entry = catalogue.entry(values.mechanism)
        separation = num_rounds if schema is None else schema.separation_in(num_rounds)
        factorization = entry.build(
            workload, schema, entry.options_of_run(options, num_rounds, min(separation, num_rounds))
        )
        schema = schema or SingleParticipation()
    multiplier = mechanism_flags.noise_multiplier(values)
    return Mechanism.of_one_schema(
        factorization, schema, own_multiplier if multiplier is None else multiplier
    )


def _drawn(values: flags.FlagValues, saved: Mechanism) -> Mechanism:
    """The mechanism of a checkpoint with drawn clients, with its own noise or the flag's."""
    command_line.check_choice(
        values.target_epsilon is None and values.target_rho is None,
        "the checkpoint is a sampled Mechanism with its own noise: leave out --target_epsilon and "
        "--target_rho, or give --noise_multiplier.",
    )
    multiplier = mechanism_flags.noise_multiplier(values)
    return saved if multiplier is None else dataclasses.replace(saved, noise_multiplier=multiplier)


if __name__ == "__main__":
    sys.exit(run())
