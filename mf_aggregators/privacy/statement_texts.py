"""The texts of a privacy statement; a sampling scheme has its own."""

import math

from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.claim import ONLY_IF, Guarantee
from mf_aggregators.kernel.numbers import counted, in_full, rounded_up
from mf_aggregators.privacy import attackers, guarantees
from mf_aggregators.private_metrics import ReleasedMetrics


def clipping(clip_norm: float, plan: Guarantee) -> str:
    """Returns how updates are clipped to a constant norm, and what noise their sums get.

    Args:
      clip_norm: The norm.
      plan: The planned guarantee.
    """
    has_noise = plan.noise_multiplier > 0.0
    noise = "the round's row of C^-1 Z, with Gaussian Z" if has_noise else "no noise"
    return (
        f"Each client's update is clipped to an L2 norm of {in_full(clip_norm)}; a\n"
        f"     round's sum gets {noise}."
    )


def adaptive_clipping(
    clip: AdaptiveClip, update_noise_multiplier: float, clipped_count_stddev: float
) -> str:
    """Returns how updates are clipped to a norm that adapts.

    Args:
      clip: How it adapts.
      update_noise_multiplier: That of the updates.
      clipped_count_stddev: The standard deviation of the sum of clipped-count indicators, over the
        sensitivity of C.
    """
    smallest, largest = clip.bounds
    return (
        "\n     Each client's update is clipped to an L2 norm that is\n"
        f"     {in_full(clip.initial_norm)} in the first round and then follows from what earlier "
        f"rounds\n     released, between {in_full(smallest)} and {in_full(largest)}, towards the "
        f"norm that\n     {in_full(clip.target_unclipped_quantile, 100)} % of the updates are "
        "within. Beside its update, a client reports a\n"
        "     clipped-count indicator: plus one half if the update was within the norm, and\n"
        "     minus one half if not. A round's sum of updates, over the round's clip norm, and\n"
        "     its sum of indicators get the round's row of\n"
        f"     C^-1 Z, with Gaussian Z: {in_full(update_noise_multiplier)} and "
        f"{in_full(clipped_count_stddev)} times the sensitivity\n"
        "     of C. Both together have the noise multiplier that is stated below.\n    "
    )


def with_metrics(released: ReleasedMetrics, is_adaptive: bool) -> str:
    """Returns which metrics are released with the updates, and their noise.

    Args:
      released: The metrics, and the noise of all of it.
      is_adaptive: Whether the clip norm adapts: the fraction within it is then said elsewhere.
    """
    ranges = ", ".join(
        f"{each.name} within {in_full(each.smallest)} and {in_full(each.largest)}"
        for each in released.metrics.metrics
    )
    fraction = "" if is_adaptive else ", and whether its update was clipped (one half either way)"
    return (
        "\n     Beside its update, a client reports metrics, each clipped to its range, from the\n"
        f"     middle of it and over it: {ranges}{fraction}.\n"
        "     Sums of metrics get the round's row of C^-1 Z as the sum of updates does. Over the\n"
        "     sensitivity of C, the noise of updates is "
        f"{in_full(released.update_noise_multiplier)} clip norms,\n     and that of a metric "
        f"{in_full(released.metric_stddev)} ranges. All of it together has the noise\n"
        "     multiplier that is stated below.\n    "
    )


def not_covered_metrics(place: str, is_adaptive: bool, *, are_released: bool) -> str:
    """Returns which metrics the guarantee does not cover, as the end of a list.

    Args:
      place: Where metrics are kept.
      is_adaptive: Whether the clip norm adapts.
      are_released: Whether those of training are released with noise.
    """
    if are_released:
        return (
            "and\n     evaluations of held-out and of test data, which no round trains on "
            "(metrics of\n     training are covered: they were released with noise)."
        )
    return (
        f"and all metrics, {place}\n"
        "     (losses, accuracies, norms and fractions are statistics of clients without noise"
        f"{BUT_FOR if is_adaptive else ''})."
    )


def left_out(*, is_adaptive: bool, has_metrics: bool) -> str:
    """Returns what is replaced by zero of the client in which neighbouring data sets differ.

    Args:
      is_adaptive: Whether the clip norm adapts.
      has_metrics: Whether metrics of training are released with noise.
    """
    if has_metrics:
        return LEFT_OUT_WITH.format(what="whose updates,\n     indicators and metrics")
    return (
        LEFT_OUT_WITH.format(what="whose updates\n     and indicators") if is_adaptive else LEFT_OUT
    )


def publishable(*, are_released: bool, has_files: bool, is_sampled: bool) -> str:
    """Returns what may be published of a run, in a sentence or two.

    Args:
      are_released: Whether metrics of training are released with noise.
      has_files: Whether there is a run directory with metrics and figures.
      is_sampled: Whether clients are drawn, and who takes part is a secret.
    """
    if not are_released:
        return (
            "The released output and this statement; not `metrics.csv`, TensorBoard's\n"
            "     files, the figure or what the command prints: metrics of training have no noise."
            if has_files
            else "The released output and this statement; no metrics of training,\n"
            "     unless they were released with noise by another mechanism."
        )
    exact = (
        ""
        if is_sampled
        else ", but for who took part and how many could: that is exact,\n     and under timers no "
        "secret"
    )
    where = (
        "`metrics.csv`, the figure\n     and what the command prints, in which all that is said of "
        f"clients that train was\n     released with noise{exact}"
        if has_files
        else "and the released\n     metrics of training"
    )
    return (
        f"The released output, this statement, {where}.\n"
        "     Evaluations of held-out and of test data are not covered: publish them if these\n"
        "     data may be. Nor are times, as TensorBoard's files and progress bars have them: how\n"
        "     long a round took may tell how much data its clients had."
    )


def together(plan: Guarantee) -> str:
    """Returns what all rounds together are, as a mechanism; nothing where there is no noise.

    Args:
      plan: The planned guarantee.
    """
    if plan.noise_multiplier == 0.0:
        return ""
    scheme = guarantees.scheme_of(plan)
    return _TOGETHER if scheme is None else scheme.words.together


def accounting(plan: Guarantee, *, has_run_directory: bool) -> str:
    """Returns how the guarantee is computed, and of which numbers it holds, in whole sentences.

    Args:
      plan: The planned guarantee.
      has_run_directory: Whether a training command wrote the statement, whose aggregator is known.
    """
    bits = _BITS if has_run_directory else _BITS_ELSEWHERE
    if plan.noise_multiplier == 0.0:
        return "None: without noise there is nothing to account for."
    gaussian = (
        "The exact privacy loss distribution of the Gaussian mechanism, by dp-accounting, "
        "and approximate zero-concentrated DP (zCDP; Bun and Steinke, 2016, Def. 8.1)."
    )
    scheme = guarantees.scheme_of(plan)
    if scheme is None:
        return f"{gaussian} No amplification by sampling or shuffling.\n     {bits}"
    words = scheme.words.accounting
    return f"{words} Approximate zCDP is stated without amplification.\n     {bits}"


def condition(guarantee: Guarantee, plan: Guarantee, *, by_times: bool) -> str:
    """Returns on what condition a guarantee is stated, as the end of a sentence.

    Args:
      guarantee: The one that is stated.
      plan: The one that was planned.
      by_times: Whether the times of rounds, and no ledger, show what was observed.
    """
    if guarantee.is_amplified:
        return (
            "on one condition: clients are drawn at random as the assumption below says, and "
            "nobody who sees what was released learns who took part"
        )
    found = (
        "timers and uploads were as the observed statement below says"
        if by_times
        else "the ledger of who took part is right"
    )
    if guarantee.is_by_rule:
        return f"on one condition: {found}, by which the stopping rule below ends the run"
    if guarantee.is_observed:
        return f"{ONLY_IF}, and {found}, so that every client had {guarantee.claim.taking_part}"
    return (
        "on one condition, which the assumption below explains: every client has "
        f"{guarantee.claim.taking_part}"
    )


def meaning(guarantee: Guarantee, num_clients: int) -> str:
    """Returns what epsilon and delta mean for a run, as sentences.

    Args:
      guarantee: The one that is stated, of a finite epsilon.
      num_clients: The population.
    """
    delta = rounded_up(guarantee.delta, ".6g")
    try:
        factor = rounded_up(math.exp(guarantee.epsilon), ".4g")
    except OverflowError:
        factor = "e^epsilon"
    expected = rounded_up(guarantee.delta * num_clients, ".4g")
    return (
        "Epsilon and delta mean this: the probability of whatever the run may release, with one "
        f"client's updates, is at most {factor} times that without them, plus delta, {delta}; "
        f"and the other way round. Delta times the {counted(num_clients, 'client')} of the "
        f"population is {expected}: delta alone would allow the data of that many clients, on "
        "average, to be published."
    )


def pair(guarantee: Guarantee) -> str:
    """Returns epsilon and delta in a few words, also where there is no guarantee."""
    return numbers.stated_pair(guarantee.epsilon, guarantee.delta)


def assumption(plan: Guarantee, enforcement: str, *, has_run_directory: bool) -> str:
    """Returns what the guarantee assumes of who takes part.

    Args:
      plan: The planned guarantee.
      enforcement: What makes clients keep their timers, as a sentence.
      has_run_directory: Whether a training command wrote the statement, whose sampling schemes say
        what it enforces.
    """
    scheme = guarantees.scheme_of(plan)
    if scheme is None:
        return (
            f"Participation timers: {plan.claim.taking_part}, where two rounds i, j of one client "
            f"are\n     |i - j| apart. {enforcement}"
        )
    return f"{scheme.words.assumption}{'' if has_run_directory else f' {enforcement}'}"


def formal(guarantee: Guarantee) -> str:
    """Returns the numbers of a guarantee, in whole sentences."""
    if not math.isfinite(guarantee.epsilon):
        if guarantee.noise_multiplier > 0.0:
            return "There is so little noise that no finite epsilon is accounted for."
        return "With no noise, there is no finite epsilon."
    kind = "exactly" if guarantee.sensitivity.is_exact else "at most"
    sensitivity = rounded_up(guarantee.sensitivity, ".6g")
    # In full: rounded, it would be the noise of another run.
    multiplier = repr(guarantee.noise_multiplier)
    dp = f"{numbers.pair(guarantee.epsilon, guarantee.delta, '.6g')}-DP"
    if guarantee.is_amplified:
        stated = f"with amplification is {dp}, and without it {zcdp(guarantee)}"
        return (
            f"The largest column norm of C is {sensitivity} and the noise multiplier relative to "
            f"it {multiplier}, which {stated}.{_certificate(guarantee)}"
        )
    return (
        f"The sensitivity of C is {kind} {sensitivity} and the noise multiplier relative to it "
        f"{multiplier}, which is {dp} and {zcdp(guarantee)}{guarantees.only_if(guarantee)}."
    )


def incomplete(gap: str) -> str:
    """Returns the sentence for a ledger that is not shown to be complete.

    Args:
      gap: The reason.
    """
    return (
        f"The ledger is not shown to be complete ({gap}), so nothing better than the plan is "
        "stated."
    )


def zcdp(guarantee: Guarantee) -> str:
    """Returns the approximate zCDP that is stated, without amplification."""
    if not math.isfinite(guarantee.rho):
        return "no zCDP at all, for lack of noise"
    return (
        f"approximate zCDP with rho = {rounded_up(guarantee.rho, '.6g')} and delta0 = "
        f"{rounded_up(guarantee.zcdp_delta, '.2g')}"
    )


def part_of_client(guarantee: Guarantee) -> str:
    """Returns what holds for a part of a client's data, in whole sentences.

    Args:
      guarantee: The one that is stated for whole clients.
    """
    part = guarantees.part_of_client(guarantee)
    half = (
        "half the noise multiplier"
        if not guarantee.is_amplified
        else "half the noise multiplier\n     of all its participations without amplification"
    )
    stated = (
        f"{half}, {part.noise_multiplier!r},\n"
        f"     which is {numbers.pair(part.epsilon, part.delta)}-DP{guarantees.only_if(guarantee)}."
        if math.isfinite(part.epsilon)
        else f"{half}, so little\n     that no epsilon is stated."
    )
    found = (
        "A part of a client's data (one example, or one of several people who share the\n"
        "     client) is protected less. With and without it, the client sends two updates that\n"
        f"     may be two clip norms apart: that is {stated}"
    )
    if part.amplified_epsilon is None or part.amplified_delta is None:
        return found
    amplified = numbers.pair(part.amplified_epsilon, part.amplified_delta)
    return (
        f"{found} With amplification, the\n     client's guarantee applied twice is {amplified}-DP."
    )


def _certificate(guarantee: Guarantee) -> str:
    certificate = guarantee.claim.certificate
    if certificate is None:
        return ""
    samples = certificate.num_samples + certificate.num_untilted
    return (
        f" Its certificate is a test with seed {certificate.seed} and {samples} random samples, "
        f"which anybody can repeat. A false one would pass it with a probability of at most "
        f"{rounded_up(certificate.failure_probability, '.2g')}, which delta covers."
    )


def attacker(guarantee: Guarantee) -> str:
    """Returns what an attacker can do, as sentences."""
    rates = attackers.rates(guarantee)
    cases = []
    for rate in attackers.FALSE_POSITIVE_RATES:
        most = rates[attackers.rate_field(rate)]
        if most is not None:
            of = round(1.0 / rate)
            # The product may be rounded down.
            recognised = rounded_up(min(math.nextafter(of * most, math.inf), float(of)), ".4g")
            cases.append(
                f"is wrong about 1 in {of} clients whose updates were not used, it recognises at "
                f"most {recognised} in {of} whose updates were"
            )
    secrets = "its noise and who was drawn" if guarantee.is_amplified else "its noise"
    return (
        f"An attacker who knows everything of the run but its secrets ({secrets}), and whatever "
        "else, now or later, guesses which clients' updates were used. "
        f"If it {'; if it '.join(cases)}. Blind guesses recognise 1."
    )


UNIT_OF_SAMPLING = """\
One client of the population with all its data, whatever they are; where every example
     is a client of its own, one example."""

SAMPLING_VERIFIED_BY_FILES = """\
`participation.npz` holds every client's rounds and the sampling scheme, `config.json` all settings.
   Both are secret here, and so are `checkpoints/sampling_seed.json` and the sizes of
   batches{sizes}: towards whoever knows who took part
   nothing is amplified. Whoever has these files checks every draw, with
   `mf-report --ledger=participation.npz --sampling_seed=checkpoints/sampling_seed.json`."""

SIZES_IN_FRACTIONS = """, which
   the fractions in `metrics.csv` and TensorBoard give away"""

SAMPLING_VERIFIED_BY_ROUNDS = """\
Every client's rounds are secret here, and so are the sampler's seed and the sizes of batches:
   towards whoever knows who took part nothing is amplified. Whoever has the rounds, the sampling
   scheme and the seed can repeat every draw and compare."""

_TOGETHER = """\
All rounds together are one Gaussian mechanism, also with updates that depend on earlier rounds."""

UNIT_OF_TIMERS = """\
One client with all its examples, whatever they are and however many. It covers
     well-behaved clients, those that keep to their participation timer; others do not change the
     guarantee of these. A person who uses two clients is protected as a part of one client is
     (below); with m clients, an m-th of the noise multiplier is left, as long as that is at least
     0.2."""

VERIFIED_BY_FILES = """\
`participation.npz` holds every client's rounds, `config.json` all settings; `mf-report --ledger`
   recomputes sensitivity and guarantee from the matrix and the rounds."""

VERIFIED_BY_TIMES = """\
Whoever has the matrix as a checkpoint and the times of the rounds recomputes sensitivity and
   guarantee, with `mf-report --checkpoint= --noise_multiplier= --delta= --round_times=
   --timer_hours=`. That devices kept timers of so many hours, and that the run had this noise, is
   what the signatory says: no file shows it."""

# Of statements that list the files that they were made from.
VERIFIED_AGAIN = """
   `mf-report --verify=` makes this statement again from the files that are listed below, and says
   what differs."""

VERIFIED_BY_ROUNDS = """\
Whoever has the matrix as a checkpoint and every client's rounds as a ledger recomputes sensitivity
   and guarantee, with `mf-report --checkpoint= --noise_multiplier= --delta= --ledger=
   --round_counts=`. That the run had this noise, and that the ledger and the server's counts are
   right, is what the signatory says: no file shows it."""

SECRET_FILES = """\
`checkpoints/` holds the noise seed and a hash of the data, and `noise/` noise rows and
     keyed digests of each round's sum: whoever has the seed, the rows or the hash can remove the
     noise, or tell which data were used."""

SECRET_STATE = """\
The noise seed is secret, and so are rows of noise and sums without noise: whoever
     has one of them can remove the noise, or tell which data were used."""

_BITS = """\
It holds for released numbers as computers hold them: sums and noise are integers, and more
     noise makes up for what rounding takes."""

_BITS_ELSEWHERE = """\
It holds for real numbers; and for released numbers as computers hold them, if sums and
     noise are the integers of this program's aggregator, whose noise makes up for what rounding
     takes."""

RELEASED = """\
Every round's noisy average update, and with it every intermediate and
     the final model."""

NOTHING_PUBLISHABLE = """\
Nothing, as far as this statement says: it guarantees nothing."""

NOTHING_PUBLISHABLE_OF_ALL = """\
Nothing that concerns every client: this statement guarantees nothing to one that took
     part beyond the planned schema."""

RELEASED_METRICS = """\
Every round's metrics of training, with noise, are as well."""

RELEASED_WITH_NORMS = """\
Every round's noisy average update, its clip norm and the noisy fraction of
     clients within that, and with them every intermediate and the final model."""

BUT_FOR = """;
     the clip norm and the fraction of clients within it are covered: they were released with
     noise"""

LEFT_OUT = """\
whose updates are
     replaced by zero in every round that it takes part in. A special form of adding or removing
     a client."""

LEFT_OUT_WITH = """\
{what} are replaced by zero in every round that it takes part in: as if it were not
     there. A special form of adding or removing a client."""

MARKDOWN = """\
# Privacy statement

{warnings}{summary}

1. **DP setting.** Central differential privacy: the server that sums the updates and adds the
   noise is trusted to do so, and to keep the noise seed secret. Towards the server itself, the
   noise protects nobody.
2. **What the definition is applied to.**
   - *Data accesses covered.* One training run: {rounds} planned rounds of {cohort}
     clients, drawn from {clients}. Public data: {public_data}. Not covered: the choice of
     hyperparameters and of the checkpoint to use; what was made of the data before or beside the
     rounds, as a vocabulary or counts; other runs on the same clients; {metrics}
     {secrets}
   - *Released output.* {released}
   - *What may be published.* {publishable}
   - *Unit of privacy.* {unit}
   - *Adjacency.* Zero-out: neighbouring data sets differ in one client, {left_out}
3. **Accounting.**
   - *Mechanism.* {mechanism}. {clipping} {together}
   - *Type of accounting.* {accounting}
   - *Assumption.* {assumption}
   - *Formal statement, planned.* {planned}{extended}
   - *Formal statement, observed.* {observed}{widened}{rule}
   - *With other runs.* {other_runs}
4. **Verifiability.** {verification}
   It rests on the program, mf_aggregators {version}: `docs/privacy-proofs.md` of its source has its
   proofs, and names the tests that attack them. A review of the program by others is not
   stated.
5. **Responsibility.**
{provenance}"""
