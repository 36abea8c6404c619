"""The record of released sums in TFF: no row of noise is ever added to two different sums.

Two sums under one row of noise reveal their difference. A process that runs a round again, after a
crash or from an older state, releases the same bits for the same sum, and must not release another
sum.

For each round of a stream of noise there is a folder, with an empty file whose name is a keyed
digest of the sum, followed by the digest of the claim that the noise is of
(``kernel.claim.Claim.noise_digest``), which is no secret. A graph cannot create a file only if it
is missing. So it looks for other names, writes its own, and looks again: of two processes that
release different sums at the same time, at most one sees its own name alone. A folder with another
name refuses every sum, and so does one with the mark of a spent round.

The digest is that of Carter and Wegman (1981): a universal hash, whose keys are drawn by ChaCha20
from the secret seed, encrypted by ChaCha20. The hash is multilinear modulo 2^64 (Lemire and Kaser
2014, Sec. 2) over integers of 32 bits, in two levels, with two keys in each: two sums that differ
have the same digest with a probability below 2^-64. Names tell nothing of sums without the seed.

The record knows rounds in its own directory alone. A loss of power may take its newest names.
"""

import os
import pathlib

import tensorflow as tf

from mf_aggregators.kernel.draws import TILE
from mf_aggregators.tff import processes, tensor_rows

# The number of coordinates that the first level of the hash takes at once. There are two keys for
# each half of a coordinate.
_PIECE = 2**14
# The row of ChaCha20 blocks from which keys are drawn: no row of noise, since those count from
# zero.
_ROW_OF_KEYS = -1
_SPENT = "spent"


class ReleaseRecord:
    """The record of the sums that were released with the streams of noise in one directory."""

    def __init__(
        self, directory: pathlib.Path, noise_digests: tuple[tuple[int, bytes], ...]
    ) -> None:
        """Opens the record in a directory of noise, and creates its folder if it is missing.

        Args:
          directory: A directory of noise.
          noise_digests: The rounds of each horizon of the run, which increase, and the digest of
            the claim of its noise (``kernel.release.Release.noise_digests``).
        """
        own = directory / "released"
        own.mkdir(mode=0o700, exist_ok=True)
        self._directory, self._noise_digests = os.fspath(own), noise_digests

    def check(
        self,
        seed: tf.Tensor,
        stream: tf.Tensor,
        i: tf.Tensor,
        sums: list[tf.Tensor],
        scales: list[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns a round's sums, in a graph that fails if the noise was added to other sums.

        Args:
          seed: (2,) int64: the secret of the noise.
          stream: (2,) int64: the name of the noise stream.
          i: int64 scalar: the round.
          sums: The int64 sums of the clients' clipped updates, before noise, in steps.
          scales: float64 scalars by which sum and noise are multiplied. Releasing the same sum with
            other scales would reveal it.

        Returns:
          The sums. Running the graph fails with InvalidArgumentError if the round was recorded
          with another sum, or is spent.
        """

        # Inside a tf.function, operations with effects run in order and are never left out.
        @tf.function(autograph=False)
        def checked(
            seed: tf.Tensor,
            stream: tf.Tensor,
            i: tf.Tensor,
            scales: tuple[tf.Tensor, ...],
            sums: tuple[tf.Tensor, ...],
        ) -> tuple[tf.Tensor, ...]:
            folder = self._folder(stream, i)
            name = tf.strings.join([_digest(seed, i, sums, scales), self._noise(i)], separator=".")
            own = tf.strings.join([folder, name], separator="/")
            with tf.control_dependencies([self._refuse_others(folder, own)]):
                written = tf.io.write_file(own, "")
            with tf.control_dependencies([written]):
                alone = self._refuse_others(folder, own)
            with tf.control_dependencies([alone]):
                return tuple(tf.identity(tensor) for tensor in sums)

        return list(checked(seed, stream, i, tuple(scales), tuple(sums)))

    def spend(self, stream: tf.Tensor, i: tf.Tensor) -> None:
        """Marks a round as spent, so that every sum of the round is refused from now on."""
        tf.io.write_file(tf.strings.join([self._folder(stream, i), _SPENT], separator="/"), "")

    def _noise(self, i: tf.Tensor) -> tf.Tensor:
        """Returns the hexadecimal digest of the claim that a round's noise belongs to."""
        # A round after the last one gets the last digest here, and is refused by its own check.
        ends = tf.constant([rounds for rounds, _ in self._noise_digests[:-1]], tf.int64)
        names = tf.constant([each.hex() for _, each in self._noise_digests])
        return tf.gather(names, tf.math.count_nonzero(ends <= i))

    def _folder(self, stream: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
        name = tf.strings.reduce_join(tf.strings.as_string(stream), separator="-")
        return tf.strings.join(
            [self._directory, "/stream-", name, "/round-", tf.strings.as_string(i)]
        )

    def _refuse_others(self, folder: tf.Tensor, own: tf.Tensor) -> tf.Operation:
        """Returns an operation that fails if a round's folder has a file of any other name."""
        names = tf.io.matching_files(tf.strings.join([folder, "/*"]))
        return tf.debugging.assert_equal(
            tf.reduce_all(tf.equal(names, own)),
            True,
            message=processes.refusal(
                "The noise of this round was added to other data before, or the round is spent, so "
                "this aggregate is not released: the difference of the two would have no noise. Go "
                "on from this state with the clients and data of that time, spend the round "
                "(MatrixFactorizationFactory.spend), or start a new run from a fresh state (the "
                f"record is in {self._directory})."
            ),
        )


def _digest(
    seed: tf.Tensor, i: tf.Tensor, sums: tuple[tf.Tensor, ...], scales: tuple[tf.Tensor, ...]
) -> tf.Tensor:
    """Returns a digest of a round's sums and scales, keyed by the seed, as text.

    Args:
      seed: (2,) int64: the secret.
      i: int64 scalar: the round.
      sums: int64 tensors of known shapes.
      scales: float64 scalars.
    """
    first = tf.zeros([], tf.int64)
    row = tf.constant(_ROW_OF_KEYS, tf.int64)
    (block,) = tensor_rows.chacha20(seed, row, (first, 1))
    of_hash, of_name = tf.unstack(tf.reshape(_integers(block)[:4], [2, 2]))
    sizes = [tensor.shape.num_elements() for tensor in sums]
    keys = _keys(of_hash, 2 * min(_PIECE, max(1, *sizes)), 0)
    pieces = [_hashed(tf.reshape(tensor, [-1]), keys) for tensor in sums]
    others = [i, *(tf.bitcast(scale, tf.int64) for scale in scales)]
    hashes = tf.concat([*(tf.reshape(piece, [-1]) for piece in pieces), tf.stack(others)], axis=0)
    keys = _keys(of_hash, 2 * hashes.shape.num_elements(), 1)
    high, low = tf.unstack(_products(hashes[tf.newaxis], keys)[0])
    (block,) = tensor_rows.chacha20(of_name, high, (low, 1))
    return tf.strings.reduce_join(tf.strings.as_string(_integers(block)[:2]), separator=".")


def _hashed(flat: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Returns (pieces, 2) int64: the two hashes of each piece of a tensor."""
    size = flat.shape.num_elements()
    if size <= _PIECE:
        return _products(flat[tf.newaxis], keys[: 2 * size])
    # Working tile by tile needs no temporary array of the size of the tensor.
    count = size // TILE
    rest = tf.pad(flat[count * TILE :], [[0, -size % _PIECE]])
    found = [_products(tf.reshape(rest, [-1, _PIECE]), keys)]
    if count:
        tiles = tf.map_fn(
            lambda number: _products(
                tf.reshape(tf.slice(flat, [number * TILE], [TILE]), [-1, _PIECE]), keys
            ),
            tf.range(count),
            fn_output_signature=tf.TensorSpec([TILE // _PIECE, 2], tf.int64),
            parallel_iterations=1,
        )
        found.append(tf.reshape(tiles, [-1, 2]))
    return tf.concat(found, axis=0)


def _products(pieces: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """Returns (rows, 2) int64: the two multilinear hashes of each row, modulo 2^64."""
    halves = tf.reshape(
        tf.bitcast(pieces, tf.int32), [-1, keys.shape[0]] if keys.shape[0] else [1, 0]
    )
    return tf.matmul(tf.cast(halves, tf.int64), keys)


def _keys(secret: tf.Tensor, count: int, row: int) -> tf.Tensor:
    """Returns (count, 2) int64 random keys, drawn by ChaCha20 from a secret."""
    blocks = tensor_rows.chacha20(
        secret, tf.constant(row, tf.int64), (tf.zeros([], tf.int64), -(-count // 4))
    )
    return tf.reshape(_integers(blocks[0]), [-1, 2])[:count]


def _integers(blocks: tf.Tensor) -> tf.Tensor:
    """Returns the bits of (blocks, 16) uint32 random words as a flat int64 tensor."""
    return tf.bitcast(tf.reshape(blocks, [-1, 2]), tf.int64)
