"""What an amplified guarantee needs of a factorization, and how it is certified."""

from mf_aggregators.arrays import FloatArray
from mf_aggregators.factorizations import Factorization
from mf_aggregators.noise import integer_rows
from mf_aggregators.noise.integer_rows import IntegerRows, Rounding
from mf_aggregators.noise.recursions import Blocks
from mf_aggregators.participation import SamplingScheme
from mf_aggregators.participation.monte_carlo import distributions, search
from mf_aggregators.participation.monte_carlo.certificates import Certification
from mf_aggregators.participation.separated import LARGEST_ROUNDING


def default_certification(*, show_progress: bool = False) -> Certification:
    """Returns how epsilons are proved for schemes without parts: seed 0, kept in the user's cache.

    Args:
      show_progress: Whether to show progress bars on standard error.
    """
    return Certification(directory=search.default_directory(), show_progress=show_progress)


def columns_of(factorization: Factorization, scheme: SamplingScheme) -> FloatArray | None:
    """Returns the columns of C that an amplified guarantee depends on.

    Args:
      factorization: C, lower triangular of at most the scheme's bands.
      scheme: How clients take part.

    Returns:
      (n, b) as ``monte_carlo.distributions`` has them, for schemes without parts; None for others.
    """
    if not scheme.depends_on_matrix:
        return None
    num_bands = factorization.strategy_bands() or factorization.num_rounds
    return distributions.columns_of_encoder(
        factorization.encode, factorization.num_rounds, num_bands
    )


def check_bands(factorization: Factorization, scheme: SamplingScheme) -> None:
    """Raises ValueError unless C is lower triangular and of at most the scheme's bands.

    The noise must follow from rows of the noise as well: where it follows from earlier rows of Z,
    roundings of a participation stay in all later rows (``noise.integer_rows``), and not in
    b, unless b is all rounds. Where clients draw for themselves, no row may be rounded by more than
    ``LARGEST_ROUNDING`` steps of Z.

    Args:
      factorization: C.
      scheme: How batches are drawn.
    """
    bands = factorization.strategy_bands()
    if bands is None or bands > scheme.num_bands:
        found = "is not square and lower triangular" if bands is None else f"has {bands} bands"
        raise ValueError(
            f"the strategy matrix of {factorization.mechanism} {found}: amplification by sampling "
            f"needs a lower-triangular matrix of at most {scheme.num_bands} bands, as many as the "
            "data have parts (BandMF Thm 4)."
        )
    if factorization.noise_recursion().draws_earlier_rows_of_z and bands < factorization.num_rounds:
        raise ValueError(
            f"the noise of {factorization.mechanism} is made from earlier rows of Z, and its "
            "roundings would reach further than its bands: for amplification by sampling, use a "
            "banded mechanism with bands for at most half of the rounds."
        )
    if scheme.depends_on_matrix:
        _check_rounding(factorization)


def _check_rounding(factorization: Factorization) -> None:
    """Raises ValueError unless rows are rounded by no more than accounting charges."""
    rows = IntegerRows.of(factorization.noise_recursion())
    # Rows that follow from rows of Z have all earlier roundings, times entries of C.
    factor = (
        integer_rows.largest_row_sum(rows.normalised)
        if rows.normalised.draws_earlier_rows_of_z
        else 1.0
    )
    for blocks in (None, Blocks.of(rows.recursion)):
        moved = factor * (1.0 + 2.0 * Rounding.of(rows, blocks).float_error)
        # Written so that NaN does not pass.
        if not moved <= LARGEST_ROUNDING:
            raise ValueError(
                f"the noise of {factorization.mechanism} may be rounded by {moved:.2g} steps, and "
                f"{LARGEST_ROUNDING:g} are accounted for where clients draw for themselves: use a "
                "banded mechanism, or a matrix that is better conditioned."
            )
