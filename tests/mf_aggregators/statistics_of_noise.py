"""Tests of independence and covariance with a stated probability of a false alarm."""

import numpy as np
import scipy.stats

# A test fails with at most this probability if the noise is what it should be.
FALSE_ALARM = 1e-7


def check_standard_normal(samples: np.ndarray) -> None:
    """Checks that columns of samples are independent standard normals.

    Tests, each at its share of FALSE_ALARM: every column's mean and variance, the variance of
    all entries together, every pair of columns' covariance, and the distribution of all entries
    (Kolmogorov-Smirnov).

    Args:
      samples: (m, p): m independent draws of p variables.
    """
    draws, variables = samples.shape
    share = FALSE_ALARM / (2 * variables + variables * (variables - 1) / 2 + 2)
    quantile = scipy.stats.norm.isf(share / 2)
    means = np.mean(samples, axis=0) * np.sqrt(draws)
    assert np.max(np.abs(means)) < quantile, means
    squares = np.sum(np.square(samples), axis=0)
    assert np.all(squares > scipy.stats.chi2.ppf(share / 2, draws)), squares / draws
    assert np.all(squares < scipy.stats.chi2.isf(share / 2, draws)), squares / draws
    # Noise of a wrong scale: a few percent show in all columns together, and not in one.
    total = np.sum(squares)
    assert total > scipy.stats.chi2.ppf(share / 2, draws * variables), total / samples.size
    assert total < scipy.stats.chi2.isf(share / 2, draws * variables), total / samples.size
    # Given the other column, a sum of products is normal with that column's square as
    # its variance.
    products = (samples.T @ samples) / np.sqrt(squares)
    np.fill_diagonal(products, 0.0)
    assert np.max(np.abs(products)) < quantile, products
    p_value = scipy.stats.kstest(samples.ravel(), "norm").pvalue
    assert p_value > share, p_value
