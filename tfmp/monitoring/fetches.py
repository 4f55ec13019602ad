"""What a hook fetches from a graph: with the steps that it reports, and after them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfmp.core.graph_search import ancestors
from tfmp.core.managers import LossScaleManager
from tfmp.core.monitors import records_of_graph
from tfmp.monitoring.reporter import StepValues, with_values


class Fetched(NamedTuple):
    """What is known after a step of a graph."""

    of_managers: list[StepValues]
    #: None if the graph has none.
    global_step: int | None
    #: Those of all managers in the graph.
    applied_steps: int


class GraphFetches:
    """The fetches for some managers in the current graph.

    `loss` is the unscaled loss of all of them, a tensor or its name. By default each manager has the losses that it
    scaled in the graph, and those that were scaled by none of `managers`: under Estimator each replica makes a manager
    of its own, of which the first one alone takes steps and is reported on.
    """

    def __init__(self, managers: Sequence[LossScaleManager], loss: tf.Tensor | str | None = None) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        given = None if loss is None else [_fetchable_tensor(self._graph, loss)]
        records = records_of_graph()
        self._losses = [
            given or [loss for owner, loss in records.losses if owner is manager or owner not in managers]
            for manager in managers
        ]
        self._each = [_OfManager(manager) for manager in managers]
        self._with_step: dict[frozenset[tf.Operation], dict[str, Any] | None] = {}
        global_step = tf.compat.v1.train.get_global_step()
        all_managers = dict.fromkeys([*managers, *records.managers])
        self._after_step = {
            "of_managers": [each.after_step for each in self._each],
            # A list, because None is not a valid fetch.
            "global_step": [] if global_step is None else [global_step.read_value()],
            "applied_steps": [manager.get_status().applied_steps for manager in all_managers],
        }

    def with_step(self, fetches: Any) -> dict[str, Any] | None:  # noqa: ANN401 - whatever `session.run` takes
        """Return what to fetch in a `session.run` call with these fetches; None if it takes no step.

        Another call, such as the initializer of an iterator, may lack the input that the losses need. The answer is
        stored for each set of fetches: a `MonitoredSession` finalizes the graph, so the answer cannot change.
        """
        try:
            ops = frozenset(_op(self._graph, fetch) for fetch in tf.nest.flatten(fetches))
        except (KeyError, TypeError, ValueError):
            return None
        if ops not in self._with_step:
            run = set(ancestors(ops, along_control=True))
            takes_step = not run.isdisjoint(self._graph.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP))
            norms = [each.norms_of(run) for each in self._each]
            self._with_step[ops] = {"losses": self._losses, "norms": norms} if takes_step else None
        return self._with_step[ops]

    def after_step(self, session: tf.compat.v1.Session, with_step: Mapping[str, Any] | None = None) -> Fetched:
        """Return what is known after a step; `with_step` has the values of what was fetched together with it."""
        found = session.run(self._after_step)
        empty: list[list[Any]] = [[] for _ in self._each]
        norms, losses = (((with_step or {}).get(kind) or empty) for kind in ("norms", "losses"))
        of_managers = [
            each.values(*values) for each, *values in zip(self._each, found["of_managers"], norms, losses, strict=True)
        ]
        (global_step,) = found["global_step"] or [None]
        return Fetched(of_managers, global_step, sum(found["applied_steps"]))


class _OfManager:
    """The fetches for the steps of one manager."""

    def __init__(self, manager: LossScaleManager) -> None:
        self._manager = manager
        records = records_of_graph()
        recorded = [record for record in records.norms if record.manager is manager]
        stored = [record.norms.read_stored() for record in recorded[-1:] if record.norms.is_recorded]
        self._fetchable = [] if stored else [record for record in recorded if record.norm is not None]
        all_norms = dict.fromkeys(record.norms for record in recorded)
        self._detectors = [each.spikes.detector for each in all_norms if each.spikes is not None]
        self._spikes = [report for each in all_norms for report in each.spike_reports()]
        self._overflows = [counts.report() for counts in records.overflow_counts(manager)]
        self.after_step = {
            "status": manager.get_status(),
            "norm": stored,
            "skipped_spikes": [detector.skipped_spikes for detector in self._detectors],
            "lasting_changes": [detector.lasting_changes for detector in self._detectors],
            "spikes": [tuple(report[1:]) for report in self._spikes],
            "overflows": [tuple(report[1:]) for report in self._overflows],
        }

    def norms_of(self, run: set[tf.Operation]) -> list[tf.Tensor]:
        """Return the norm of a step, to be fetched with it; `run` has the ops of its call.

        The norm of another step must not be fetched: that would compute its gradients, and exchange them with workers
        that do not take part.
        """
        return [record.norm for record in self._fetchable if record.op in run][-1:]

    def values(self, after_step: Mapping[str, Any], norms: Sequence[Any], losses: Sequence[Any]) -> StepValues:
        """Return the values of a step from what was fetched after it and with it."""
        status = after_step["status"]
        norms = [*after_step["norm"], *norms] if status.attempted_steps else []
        return StepValues(
            self._manager,
            status,
            gradient_norm=float(norms[-1]) if norms else None,
            skipped_spikes=int(sum(after_step["skipped_spikes"])) if self._detectors else None,
            overflows=list(map(with_values, self._overflows, after_step["overflows"])),
            spikes=list(map(with_values, self._spikes, after_step["spikes"])),
            lasting_changes=int(sum(after_step["lasting_changes"])),
            max_consecutive_skips=max([each.max_consecutive_skips for each in self._detectors], default=0),
            # A loss may have a value for each example.
            losses=[float(value) for loss in losses for value in np.ravel(loss)],
        )


def _fetchable_tensor(graph: tf.Graph, loss: tf.Tensor | str) -> tf.Tensor:
    name = f"{loss}:0" if isinstance(loss, str) and ":" not in loss else loss
    try:
        tensor = graph.as_graph_element(name, allow_operation=False)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"loss must be a tensor of the graph, or the name of one, got {loss!r}: {error}") from error
    if not graph.is_fetchable(tensor):
        raise ValueError(f"loss must be a tensor that can be fetched, got {loss!r} inside a conditional or a loop.")
    return tensor


def _op(graph: tf.Graph, fetch: Any) -> tf.Operation:  # noqa: ANN401 - whatever `session.run` takes
    element = graph.as_graph_element(fetch)
    return element if isinstance(element, tf.Operation) else element.op
