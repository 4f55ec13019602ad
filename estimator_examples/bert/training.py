"""A pre-training run: training and evaluation with Estimator, and the report."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence

import tensorflow as tf

from estimator_examples.bert import console, hooks, model_function, modeling, optimization, outline, records, report
from estimator_examples.bert.history import History, read_steps, until_checkpoint
from estimator_examples.bert.options import Options
from estimator_examples.bert.preparation import Prepared
from estimator_examples.bert.progress import Progress
from estimator_examples.bert.workers import SingleWorker


def run(options: Options, prepared: Prepared, worker: SingleWorker) -> report.Summary:
    """Train from the checkpoint in the model directory, or from the start; then evaluate and report.

    Args:
        options: The settings of the run.
        prepared: The data.
        worker: This worker, which must be worker 0.

    Returns:
        The summary, which is also written to the model directory, together with the picture.

    Raises:
        HistoryError: The record of the earlier runs in the directory is damaged or incomplete.
        TooManySkippedStepsError: Too many steps in a row were skipped.
    """
    resumed_step = int(saved_number(options.model_dir, "global_step") or 0)
    history = History(options.model_dir / "history.csv", resumed_step)
    if resumed_step:
        console.say(f"Continuing from step {resumed_step} in {options.model_dir}.")
    if resumed_step < options.num_train_steps:
        _train_and_record(options, prepared, worker, history, resumed_step)
    else:
        console.say(f"There is nothing to train up to step {options.num_train_steps}.")
    estimator = _estimator(options, prepared, worker, first_attempt=0, observers=())
    metrics = estimator.evaluate(records.evaluation_input(prepared.held_out_path, prepared.limits, options.batch_size))
    summary = report.summarize(
        history.steps,
        precision=options.precision,
        loss_scaling=options.loss_scaling,
        evaluation={name: float(metrics[name]) for name in model_function.METRICS},
        checkpoint=estimator.latest_checkpoint(),
        picture=str(options.model_dir / "loss_and_scale.png"),
    )
    report.write_summary(summary, options.model_dir / "summary.json")
    trained = f"{outline.model_text(options)}, in {options.precision} with {options.loss_scaling}"
    report.draw(history.steps, trained).savefig(summary.picture, dpi=110)
    return summary


def follow(options: Options, prepared: Prepared, worker: SingleWorker) -> None:
    """Train together with worker 0, which keeps the record of the steps, and reports.

    Args:
        options: The settings of the run.
        prepared: The data.
        worker: This worker, which is not worker 0.

    Raises:
        TooManySkippedStepsError: Too many steps in a row were skipped.
    """
    resumed_step = int(saved_number(options.model_dir, "global_step") or 0)
    attempts = until_checkpoint(read_steps(options.model_dir / "history.csv"), resumed_step)
    if resumed_step < options.num_train_steps:
        _train(options, prepared, worker, len(attempts), [])


def saved_number(model_dir: pathlib.Path, name: str) -> float | None:
    """Return a scalar variable of the latest checkpoint; None if there is no checkpoint."""
    path = tf.train.latest_checkpoint(str(model_dir))
    if path is None:
        return None
    return tf.train.load_checkpoint(path).get_tensor(name).item()


def _train_and_record(
    options: Options, prepared: Prepared, worker: SingleWorker, history: History, resumed_step: int
) -> None:
    loss_scale = _starting_loss_scale(options)
    weights = modeling.count_weights(model_config(options, prepared))
    console.say(outline.outline(options, prepared.sizes, weights, worker.count, resumed_step, loss_scale))
    progress = Progress(
        first_step=resumed_step,
        last_step=options.num_train_steps,
        batch_size=options.batch_size * worker.count,
        every=options.log_every,
        loss_scale=loss_scale,
    )
    with contextlib.closing(progress):
        _train(options, prepared, worker, len(history.steps), [history.append, progress.show])


def _train(
    options: Options, prepared: Prepared, worker: SingleWorker, attempts: int, observers: Sequence[hooks.Observer]
) -> None:
    stop = hooks.stop_after_skips(options.max_consecutive_skips)
    estimator = _estimator(options, prepared, worker, attempts + 1, [*observers, stop])
    input_fn = records.training_input(
        prepared.training_path,
        prepared.limits,
        options.batch_size,
        options.seed,
        skip_batches=attempts,
        workers=worker.count,
        rank=worker.rank,
    )
    worker.train(estimator, tf.estimator.TrainSpec(input_fn, options.num_train_steps))


def _starting_loss_scale(options: Options) -> float:
    if options.fixed_loss_scale is not None:
        return options.fixed_loss_scale
    saved = saved_number(options.model_dir, "loss_scale")
    if saved is None:
        return options.init_loss_scale
    console.say(f"The loss scale continues at {report.scale_text(saved)}; --init_loss_scale is for new directories.")
    return saved


def model_config(options: Options, prepared: Prepared) -> modeling.BertConfig:
    """Return the shape of the model that the options ask for."""
    return modeling.BertConfig(
        vocab_size=prepared.sizes.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        seq_length=options.seq_length,
        dropout=options.dropout,
        precision=options.precision,
        recompute=options.recompute,
    )


def _estimator(
    options: Options,
    prepared: Prepared,
    worker: SingleWorker,
    first_attempt: int,
    observers: Sequence[hooks.Observer],
) -> tf.estimator.Estimator:
    model_dir, first = str(options.model_dir), worker.rank == 0
    model_fn = model_function.make_model_function(
        model_config(options, prepared),
        optimization.OptimizerSettings(
            learning_rate=options.learning_rate,
            num_train_steps=options.num_train_steps,
            num_warmup_steps=options.num_warmup_steps,
            weight_decay=options.weight_decay,
            clip_norm=options.clip_norm,
            loss_scale=options.fixed_loss_scale,
            init_loss_scale=options.init_loss_scale,
            incr_every_n_steps=options.incr_every_n_steps,
            is_distributed=worker.count > 1,
            aggregation_dtype=options.aggregation_dtype,
        ),
        model_function.Watching(first_attempt, observers, summary_dir=model_dir if first else None),
    )
    config = tf.estimator.RunConfig(
        model_dir=model_dir,
        tf_random_seed=options.seed,
        # The other workers read the checkpoints of worker 0, and write none.
        save_checkpoints_steps=options.save_checkpoints_steps if first else None,
        save_summary_steps=options.log_every if first else None,
        keep_checkpoint_max=2,
        log_step_count_steps=None,
        train_distribute=worker.strategy,
    )
    return tf.estimator.Estimator(model_fn, config=config)
