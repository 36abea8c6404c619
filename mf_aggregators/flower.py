"""A Flower strategy that wraps FedAvg or a subclass, and adds noise by matrix factorization.

A server creates the strategy, and starts it with Flower's connection to the nodes::

    strategy = MatrixFactorization(
        FedAvgM(server_learning_rate=2.0), mechanism, 0.3, clients_per_round=10, directory="run"
    )
    result = strategy.start(grid, initial_arrays)

Like Flower's own strategies for differential privacy, it wraps another strategy. It draws the
clients of a round among those whose participation the schema allows, and lets
``mf_aggregators.Aggregator`` clip and sum their updates and add noise. The wrapped strategy
receives the model plus the noisy mean, as if one client had sent it; its further computations are
post-processing.

The run's directory has everything that a restart needs, also the secret seed of the noise, so it is
private. A run that is started again continues after its last round.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.app import RecordDict as Records
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from mf_aggregators import atomic_files, checkpoints
from mf_aggregators.adaptive_clip import AdaptiveClip
from mf_aggregators.aggregator import Aggregator, AggregatorState, ReleaseError, StateError
from mf_aggregators.kernel import numbers
from mf_aggregators.kernel.numbers import Error, IntArray
from mf_aggregators.mechanism import Mechanism
from mf_aggregators.participation import Participation
from mf_aggregators.privacy import ledgers
from mf_aggregators.privacy.ledgers import GivenLedger, Ledger, LedgerError, RoundTimes
from mf_aggregators.privacy.statements import Statement

# The action by which a ClientApp tells its client's name: ``@app.query(NAME_ACTION)``.
NAME_ACTION = "client_name"

# The advice in messages about files that do not fit together.
_WHAT_TO_DO = (
    "Restore the newest files, which belong together, or start in another directory and account "
    "for both runs."
)
# Sentences of the statement about this strategy.
_ENFORCEMENT = (
    "The server asks a client only in rounds that the schema allows, by the name that the client "
    "says; that each client keeps one name is not checked."
)
_COUNTS = "the strategy, which sums only updates of clients in its ledger"
_log = logging.getLogger("flwr")


class _RoundError(Error, RuntimeError):
    """A round cannot take place, and nothing of it was released: start the run again."""


def name_reply(message: Message, name: str) -> Message:
    """Returns a ClientApp's reply to the query ``NAME_ACTION``, with its client's name.

    Use it when you write a ClientApp: the strategy asks each node for the name of its client.

    The ids of nodes change with each process of Flower, but a client must keep one name during a
    run. A client with two names may take part more often than its guarantee allows.

    Args:
      message: The query.
      name: The client's name, such as the ``partition-id`` of a simulation.

    Example:
      >>> from flwr.app import Message, RecordDict
      >>> from mf_aggregators.flower import NAME_ACTION, name_reply
      >>> query = Message(RecordDict(), dst_node_id=1, message_type=f"query.{NAME_ACTION}")
      >>> name_reply(query, "ada").content[NAME_ACTION][NAME_ACTION]
      'ada'
    """
    return Message(Records({NAME_ACTION: ConfigRecord({NAME_ACTION: name})}), reply_to=message)


class MatrixFactorization(Strategy):
    """Differential privacy by matrix factorization, around FedAvg or a subclass.

    Use it when you train with Flower: wrap your strategy.

    Clients send models, as to FedAvg, and all have the same weight. A client that fails, or sends
    something that is not a model of the round or has a NaN, counts as zero.

    Only the noisy mean is released. Clients' metrics would have no noise, so training metrics are
    dropped, and no client is asked to evaluate. ``evaluate_fn`` of ``start`` evaluates on the
    server.

    Example:
      >>> import tempfile
      >>> from flwr.serverapp.strategy import FedAvg, Strategy
      >>> import mf_aggregators as mfa
      >>> from mf_aggregators.flower import MatrixFactorization
      >>> timers = mfa.participation.MinSeparation(separation=4)
      >>> matrix = mfa.factorizations.banded(8, num_bands=4, participation=timers)
      >>> mechanism = mfa.calibrate(matrix, timers, epsilon=8.0, delta=1e-6)
      >>> strategy = MatrixFactorization(FedAvg(), mechanism, 0.3, 10, tempfile.mkdtemp())
      >>> isinstance(strategy, Strategy)  # its start(grid, initial_arrays) runs the rounds
      True
    """

    def __init__(
        self,
        strategy: FedAvg,
        mechanism: Mechanism,
        clip_norm: float | AdaptiveClip,
        clients_per_round: int,
        directory: str | os.PathLike[str],
        *,
        cohort_seed: int = 0,
        patience: float = 600.0,
        **options: object,
    ) -> None:
        """Creates the strategy.

        Args:
          strategy: The strategy that updates the model by the noisy mean: ``FedAvg``, ``FedAvgM``,
            ``FedAdam`` or another subclass, with the default ``fraction_train=1``, because it must
            not draw clients. Its arrays are saved.
          mechanism: The mechanism, with a schema and without sampling.
          clip_norm: The L2 norm to which a client's whole update is clipped: a number, or an
            ``AdaptiveClip``.
          clients_per_round: The cohort size, by which the sum is divided.
          directory: The run's private directory, for one process at a time; created if it is
            missing.
          cohort_seed: The seed, at least 0, by which cohorts are drawn. It is not secret, because a
            guarantee under a schema holds for any cohorts.
          patience: The seconds to wait for nodes to tell their names, and for enough clients that
            may take part.
          **options: Further options of ``mf_aggregators.Aggregator``, such as ``noise_storage``.

        Raises:
          TypeError: If an argument has the wrong type.
          ValueError: If a number is out of its range, the mechanism has a sampling scheme, the
            wrapped strategy would draw clients, or the directory cannot be used.
        """
        if not isinstance(strategy, FedAvg):
            raise TypeError(
                f"strategy must be FedAvg or a subclass, found {numbers.shown(strategy)}."
            )
        self._cohort_size = numbers.positive_integer(clients_per_round, "clients_per_round")
        least = max(strategy.min_train_nodes, strategy.min_available_nodes)
        if strategy.fraction_train != 1.0 or least > self._cohort_size:
            raise ValueError(
                "the wrapped strategy must not draw clients: leave its fraction_train at 1, and "
                f"give it min_train_nodes and min_available_nodes of at most {self._cohort_size}."
            )
        self._aggregator = Aggregator(
            mechanism,
            clip_norm,
            clients_per_round,
            noise_directory=directory,
            **options,  # type: ignore[arg-type]  # The aggregator checks them.
        )
        if mechanism.sampling is not None:
            raise ValueError(
                f"mechanism has the sampling scheme {mechanism.sampling.name}, whose draws are "
                "secret, and this strategy needs a participation schema, such as MinSeparation."
            )
        self._strategy = strategy
        self._mechanism = mechanism
        self._cohort_seed = numbers.integer_at_least(cohort_seed, 0, "cohort_seed")
        self._patience = numbers.non_negative_number(patience, "patience")
        self._directory = pathlib.Path(directory)
        self._ledger_path = self._directory / "ledger.npz"
        self._rounds: dict[str, list[int]] = {}
        self._names: dict[int, str] = {}
        self._asked: set[int] = set()
        self._arrays: dict[str, np.ndarray] = {}
        self._state: AggregatorState | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Runs all rounds of a new run, or the remaining rounds of a saved one.

        Args:
          grid: Flower's connection to the nodes.
          initial_arrays: The initial model; ignored if the run is resumed.
          num_rounds: The number of rounds of the whole run; None for all rounds of the mechanism.
          timeout: The seconds to wait for the replies of a round.
          train_config: The configuration that clients receive with the model.
          evaluate_config: Ignored, because no client evaluates.
          evaluate_fn: Evaluates a model on the server, given the number of rounds before it.

        Returns:
          The model, and the metrics of this call's rounds, by round from 1 over the whole run.

        Raises:
          LedgerError: If the ledger is not that of the saved model.
          OSError: If the directory cannot be written.
          ReleaseError: If the mechanism has fewer rounds, or a round was released with other
            updates.
          Error: If too few clients may take part, or no client answered.
          StateError: If saved files are damaged, lost, or of another mechanism.
        """
        total = self._mechanism.num_rounds if num_rounds is None else num_rounds
        if total > self._mechanism.num_rounds:
            raise ReleaseError(
                f"num_rounds is {total}, and the mechanism has noise for "
                f"{self._mechanism.num_rounds} rounds: use at most as many, or extend it."
            )
        done = self._begin(initial_arrays)

        def evaluate(server_round: int, model: ArrayRecord) -> MetricRecord | None:
            return None if evaluate_fn is None else evaluate_fn(done + server_round, model)

        result = super().start(
            grid, _record(self._arrays), max(total - done, 0), timeout, train_config, None, evaluate
        )
        result.arrays = _record(self._arrays)
        for found in (result.train_metrics_clientapp, result.evaluate_metrics_serverapp):
            shifted = {done + i: metrics for i, metrics in found.items()}
            found.clear()
            found.update(shifted)
        return result

    def spend(self) -> None:
        """Gives up the round in which a run stopped; ``start`` then continues with the next round.

        Call this if the round's clients never come back, or its saved sum is damaged. The round's
        noise is never added to a sum, and the model does not change. The round's clients count as
        having taken part, because its sum may have been released, and stay in the ledger.

        Raises:
          LedgerError: If the ledger is not that of the saved model.
          OSError: If the directory cannot be written.
          ReleaseError: If the mechanism has no further round.
          StateError: If there is no run, or saved files are damaged or of another mechanism.
        """
        if not self._load_newest():
            raise StateError(f"{self._directory} has no run, so that there is no round to spend.")
        i = self._running().round_index
        self._state = self._aggregator.spend(self._running())
        self._save()
        self._remove(i)

    def statement(
        self, ledger: GivenLedger | RoundTimes | None = None, **options: object
    ) -> Statement:
        """Returns the privacy statement of the run in the directory.

        Args:
          ledger: None for the strategy's own ledger, which has all clients before they are asked;
            or a ledger as for ``mf_aggregators.Aggregator.statement``.
          **options: ``population``, ``public_data`` and others, as there. By default,
            ``enforcement`` describes the strategy.

        Raises:
          LedgerError: As there, and if the ledger is not that of the saved model.
          RecordError: As there.
          StateError: If there is no run, or what was saved is damaged or of another mechanism.
          TypeError: As there.
          ValueError: As there.
        """
        if self._state is None and not self._load_newest():
            raise StateError(f"{self._directory} has no run for a statement.")
        known = dataclasses.replace(
            self._aggregator.known_facts(
                self._running(), "the Flower strategy MatrixFactorization"
            ),
            secure_sums=False,
            origin_of_sums="the strategy gets the model of each client",
            enforcement=_ENFORCEMENT,
        )
        if ledger is None and "round_counts" not in options:
            ledger = ledgers.load(self._ledger_path)
            known = dataclasses.replace(known, counts=_COUNTS)
            options["round_counts"] = [len(cohort) for cohort in ledger.cohorts()]
        found = self._ledger_path if ledger is None else ledger
        # KnownFacts.statement checks them.
        return known.statement(found, **options)  # type: ignore[arg-type]

    def summary(self) -> None:
        """Logs the mechanism, the directory and the wrapped strategy."""
        for line in (*str(self._mechanism).splitlines(), f"directory {self._directory}"):
            _log.info("\t├──> %s", line)
        self._strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draws the clients of a round, and saves them in the ledger before any is asked."""
        nodes = self._drawn(grid)
        self._asked = set(nodes)
        messages = list(self._configured(arrays, config, nodes))
        if sorted(each.metadata.dst_node_id for each in messages) != sorted(nodes):
            raise _RoundError("the wrapped strategy asked other clients than those of the round.")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Adds up clipped updates and noise; the wrapped strategy then makes the new model."""
        state, number = self._running(), 0
        sums: list[IntArray] = []
        for update in filter(None, map(self._update, replies)):
            record = self._aggregator.record(state, update)
            sums = [a + b for a, b in zip(sums, record, strict=True)] if number else record
            number += 1
        if not number:
            raise _RoundError(f"no client of round {state.round_index + 1} has answered.")
        # The sum is saved, because clients may send other updates if they are asked again.
        with atomic_files.writing(self._path("sum", state.round_index), mode=0o600) as file:
            np.savez(file, np.array(number), *sums)
        arrays = self._released(sums, number)
        return arrays, MetricRecord(dict(self._aggregator.metrics(self._running())))

    def configure_evaluate(self, *_: object) -> Iterable[Message]:
        """Returns no messages: metrics of clients would be released without noise."""
        return []

    def aggregate_evaluate(self, *_: object) -> None:
        """Returns None, because no client was asked."""

    def _running(self) -> AggregatorState:
        if self._state is None:
            raise _RoundError("the strategy has no run: call start() first.")
        return self._state

    def _configured(
        self, arrays: ArrayRecord, config: ConfigRecord, nodes: Sequence[int]
    ) -> Iterable[Message]:
        """The messages of the wrapped strategy, which sees only these nodes."""
        self._arrays = _of_record(arrays)
        server_round = self._running().round_index + 1
        # The only part of the grid that the wrapped strategy uses.
        grid = types.SimpleNamespace(get_node_ids=lambda: nodes)
        messages: Iterable[Message] = self._strategy.configure_train(
            server_round, arrays, config, grid
        )
        return messages

    def _update(self, reply: Message) -> dict[str, np.ndarray] | None:
        """A client's change of the model; None if it sent no model of this round."""
        node, models = reply.metadata.src_node_id, []
        # A second update of a client would move the sum by another clip norm, so it is ignored.
        if node in self._asked and not reply.has_error():
            self._asked.remove(node)
            # The bytes come from a client, and reading them may raise errors of many types.
            with contextlib.suppress(Exception):
                models = [_of_record(each) for each in reply.content.array_records.values()]
            if len(models) == 1 and _shapes(models[0]) == _shapes(self._arrays):
                with np.errstate(invalid="ignore", over="ignore"):
                    return {name: models[0][name] - old for name, old in self._arrays.items()}
        reason = reply.error.reason if reply.has_error() else "it sent no model of this round"
        _log.warning("node %d counts as zero: %s", node, reason)
        return None

    def _released(self, sums: Sequence[IntArray], number: int) -> ArrayRecord:
        """Adds the round's noise to a sum, and saves the new model and state."""
        i = self._running().round_index
        self._state, mean = self._aggregator.release(self._running(), sums, number, self._arrays)
        content = {
            self._strategy.arrayrecord_key: _record(
                {name: old + mean[name] for name, old in self._arrays.items()}
            ),
            "metrics": MetricRecord({self._strategy.weighted_by_key: 1.0}),
        }
        reply = Message(Records(content), dst_node_id=0, message_type=MessageType.TRAIN)
        arrays, _ = self._strategy.aggregate_train(i + 1, [reply])
        # Some strategies of Flower return float64 arrays for a float32 model.
        self._arrays = {
            name: array.astype(self._arrays[name].dtype)
            for name, array in _of_record(arrays).items()
        }
        self._save()
        self._remove(i)
        return _record(self._arrays)

    # Who takes part.

    def _drawn(self, grid: Grid) -> list[int]:
        """The nodes of the next round: of the clients in the ledger, or of newly drawn ones."""
        i = self._running().round_index
        before = [name for name, rounds in self._rounds.items() if i in rounds]
        deadline = time.monotonic() + self._patience
        while True:
            nodes = self._connected(grid)
            allowed = before or sorted(filter(lambda name: self._may_join(name, i), nodes))
            found = [name for name in allowed if name in nodes]
            is_late = time.monotonic() >= deadline
            if len(found) >= self._cohort_size or (before and found and is_late):
                break
            if is_late:
                if before:
                    raise _RoundError(
                        f"none of the {len(before)} clients of round {i + 1} is connected by its "
                        "name: connect them and start the run again, or give the round up by "
                        "spend(), which counts them as having taken part."
                    )
                raise _RoundError(
                    f"round {i + 1} needs {self._cohort_size} clients: {len(nodes)} are connected "
                    f"by a name, of which {len(found)} may take part ({self._schema(i)}). Connect "
                    "others, and start the run again: it continues with this round."
                )
            time.sleep(min(1.0, self._patience))
        if not before:
            generator = np.random.default_rng([self._cohort_seed, i])
            found = generator.choice(found, self._cohort_size, replace=False).tolist()
            rounds = {**self._rounds, **{each: [*self._rounds.get(each, ()), i] for each in found}}
            of_clients = tuple(np.array(each, np.int64) for each in rounds.values())
            Ledger(tuple(rounds), of_clients, i + 1).save(self._ledger_path)
            self._rounds = rounds
        return [nodes[name] for name in found]

    def _schema(self, i: int) -> Participation:
        """The schema that is in force in a round: that of the first horizon with this round."""
        return next(
            each.noise_reference for each in self._mechanism.horizons if i < each.num_rounds
        )

    def _may_join(self, name: str, i: int) -> bool:
        rounds = [*self._rounds.get(name, ()), i]
        gaps = np.diff(rounds).tolist()
        smallest, largest = min(gaps, default=None), max(gaps, default=None)
        return bool(self._schema(i).as_schema().allows_separations(len(rounds), smallest, largest))

    def _connected(self, grid: Grid) -> Mapping[str, int]:
        """The connected nodes, by the names of their clients."""
        connected = set(grid.get_node_ids())
        action = f"{MessageType.QUERY}.{NAME_ACTION}"
        queries = [
            Message(Records(), dst_node_id=node, message_type=action)
            for node in sorted(connected - self._names.keys())
        ]
        for reply in grid.send_and_receive(queries, timeout=self._patience) if queries else []:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason)
                name = reply.content[NAME_ACTION][NAME_ACTION]
                ledgers.check_names([name])
                self._names[node] = name
            except (KeyError, TypeError, ValueError) as error:
                _log.warning("node %d gave no name, and takes no part: %s", node, error)
        named = {node: name for node, name in self._names.items() if node in connected}
        number = collections.Counter(named.values())
        # Two nodes with the same name may be one client, so they are left out.
        return {name: node for node, name in named.items() if number[name] == 1}

    # Files.

    def _path(self, kind: str, i: int) -> pathlib.Path:
        return self._directory / f"{kind}-{i:06d}.npz"

    def _remove(self, i: int) -> None:
        """Removes the files of round i after those of the next round were written."""
        for kind in ("sum", "state", "model"):
            self._path(kind, i).unlink(missing_ok=True)

    def _load_newest(self) -> bool:
        """Loads the newest saved round; returns False if there is none."""
        saved = sorted(self._directory.glob("model-*.npz"))
        if saved:
            self._load(int(saved[-1].stem.partition("-")[2]))
        return bool(saved)

    def _begin(self, initial_arrays: ArrayRecord) -> int:
        """Begins or resumes a run; returns the number of rounds that are done."""
        self._arrays = _of_record(initial_arrays)
        if not self._load_newest():
            if self._ledger_path.exists() or (self._directory / "released").exists():
                raise StateError(
                    f"{self._directory} has files of rounds, but no model. {_WHAT_TO_DO}"
                )
            self._state = self._aggregator.with_template(self._arrays).initialize()
            self._save()
        unfinished = self._path("sum", self._running().round_index)
        # A saved sum is kept until a mechanism with a row for its round is used.
        if unfinished.exists() and self._running().round_index >= self._mechanism.num_rounds:
            raise ReleaseError(
                f"{unfinished} belongs to a round after the {self._mechanism.num_rounds} rounds of "
                "the mechanism: use the mechanism that extends it."
            )
        self._mechanism.save(self._directory / "mechanism")
        if unfinished.exists():
            number, *sums = _loaded(unfinished).values()
            # Lets the wrapped strategy store the model with which the round begins.
            self._configured(_record(self._arrays), ConfigRecord(), range(self._cohort_size))
            self._released(sums, int(number))
        return self._running().round_index

    def _digest(self, num_rounds: int) -> str:
        """A digest of the run and of the ledger's first rounds."""
        pairs = [(name, i) for name, found in self._rounds.items() for i in found if i < num_rounds]
        shown = self._running().noise.stream.tolist(), sorted(pairs)
        return hashlib.sha256(json.dumps(shown).encode()).hexdigest()

    def _save(self) -> None:
        """Writes the state first, and then the model with the wrapped strategy's arrays."""
        state = self._running()
        self._aggregator.save_state(state, self._path("state", state.round_index))
        attributes = [("-", self._arrays), *vars(self._strategy).items()]
        arrays = {
            f"{attribute}/{type(nest).__name__}/{key}": array
            for attribute, nest in attributes
            for key, array in _items(nest).items()
        }
        digest = np.array(self._digest(state.round_index))
        with atomic_files.writing(self._path("model", state.round_index), mode=0o600) as file:
            np.savez(file, digest, **arrays)

    def _load(self, i: int) -> None:
        path = self._path("model", i)
        nests: dict[tuple[str, str], dict[str, np.ndarray]] = {}
        saved = _loaded(path)
        digest = str(saved.pop("arr_0"))
        for name, array in saved.items():
            attribute, kind, key = name.split("/", 2)
            nests.setdefault((attribute, kind), {})[key] = array
        self._arrays = nests.pop(("-", "dict"))
        self._state = self._aggregator.load_state(self._path("state", i))
        if self._ledger_path.exists():
            ledger = ledgers.load(self._ledger_path)
            rounds = (each.tolist() for each in ledger.rounds_of_clients)
            self._rounds = dict(zip(ledger.client_ids, rounds, strict=True))
        if self._digest(i) != digest:
            raise LedgerError(
                f"{self._ledger_path} or the state does not belong to {path}. {_WHAT_TO_DO}"
            )
        for (attribute, kind), items in nests.items():
            nest = {"list": list(items.values()), "dict": items}.get(kind)
            setattr(self._strategy, attribute, _record(items) if nest is None else nest)


def _loaded(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file, in the order in which they were written."""
    try:
        return checkpoints.archived_arrays(path)
    except (OSError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error}. {_WHAT_TO_DO}") from error


def _record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def _of_record(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def _shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _items(nest: object) -> Mapping[str, np.ndarray]:
    """The arrays of a list, a dict or a record, by name; empty for other values."""
    items = dict(enumerate(nest)) if isinstance(nest, list) else nest
    if isinstance(items, ArrayRecord):
        return _of_record(items)
    # NumPy's scalars (from arrays without axes) are not instances of np.ndarray.
    kinds = (np.ndarray, np.generic)
    if isinstance(items, dict) and all(isinstance(each, kinds) for each in items.values()):
        return {str(key): array for key, array in items.items()}
    return {}
