"""One process's part of a training run, from the first state to the last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxvlm.build import (
    adapters,
    foresight,
    pair_run,
    record,
    sheets,
    training,
    trunk,
    warm_files,
)
from jaxvlm.build.caching import kept_of, with_chunk, written_of
from jaxvlm.build.hooks import RunHooks
from jaxvlm.build.loaded import Loaded
from jaxvlm.build.losses import of_vectors
from jaxvlm.build.scorer import Report, Scorer
from jaxvlm.build.setup import peak_flops
from jaxvlm.build.tier_bytes import tiers
from jaxvlm.build.tokens import Keeper, alarm_of, open_keeper, share_rows
from jaxvlm.build.warm import Warm, open_warm, saved_in
from jaxvlm.config import ConfigError, TrainConfig
from jaxvlm.data.errors import DataError
from jaxvlm.data.iterate import TrainBatches, resume_step
from jaxvlm.data.run_data import make_dataset
from jaxvlm.data.slots import Written
from jaxvlm.io.checkpoint import Checkpointer, restore_params
from jaxvlm.parallel import distributed
from jaxvlm.parallel.mesh import mesh_text
from jaxvlm.plan import count
from jaxvlm.train import loop, programs
from jaxvlm.train.metrics import MetricWriter
from jaxvlm.train.pairs import rows_of
from jaxvlm.train.progress import Progress
from jaxvlm.train.room import Room
from jaxvlm.types import Batch, Pairs, TrainState

if TYPE_CHECKING:
    from jaxvlm.build.run import Run

_NOT_ITS_OWN = (
    "a frozen tower's should be the same: look at the store with `jaxvlm cache verify`, or leave "
    "it out; config.cache.trust='all' takes no tokens of other machines and versions"
)
_ADVICE = [
    "raise config.microbatches (exact, a little slower)",
    "config.model.decoder.remat=dots, then full (about a third slower)",
    "config.mesh.fsdp=N over more devices",
    "lower config.data.batch_size, config.data.max_length or config.data.max_patches",
]
_ADVICE_OF_PAIRS = [
    "config.grad_cache.query and document, fewer rows at a time (exact, a third slower at most)",
    "config.mesh.fsdp=N over more devices",
    "lower config.data.batch_size or the lengths of config.data.pairs",
]


def fit(run: Run, workdir: pathlib.Path) -> tuple[TrainState, dict[str, Any]]:
    """Train ``run`` to its end; see ``Run.fit``."""
    config = run.config
    with contextlib.ExitStack() as stack:
        if not jax.process_index():
            stack.enter_context(record.locked(workdir))
        lines: list[str] = []
        checkpointer = Checkpointer(
            workdir / "checkpoints",
            config.checkpoint.keep,
            config.checkpoint.metric,
            config.checkpoint.mode,
            on_warning=lines.append,
        )
        distributed.check_same(
            "settings or data", [run.dataset.fingerprint(), run.steps, dataclasses.asdict(config)]
        )
        made = run.training
        state, start, extra = _first_state(run, made, checkpointer, lines.append)
        scorer = _scorer(run)
        run.write_down(workdir)  # not before: a config that does not fit must not replace the run's
        progress = stack.enter_context(contextlib.closing(Progress(run.steps, start)))
        for line in lines:
            progress.log(line)
        made.step.say = progress.log
        kept = with_chunk(config, run.mesh).chunk, kept_of(config.cache, config.network)
        keeper = open_keeper(run.cache_inputs, lambda: made.params(state), *kept, progress.log)
        if keeper:
            stack.callback(keeper.close)
        warm = _warm(run, workdir, start, extra.get("warm"), progress.log, stack)
        pages = sum(programs.bytes_of(x) for x in jax.tree.leaves(state.cache))
        room = made.room(config.cache.halvings, progress.log)
        written = _written(run, made, room, stack)
        source = stack.enter_context(contextlib.closing(run.dataset.train(run.rows, start)))
        batches = _GlobalBatches(source, made.place, warm)
        writer = MetricWriter(workdir, config.tensorboard, config.wandb_project, start or -1)
        stack.enter_context(contextlib.closing(writer))
        foreseen = foresight.foresee(run, batches.peek())
        progress.log(foreseen if isinstance(foreseen, str) else foreseen.line())
        peak, source_of_peak = peak_flops(run.meshes, config.network.dtype)
        hooks = RunHooks(
            config=config,
            writer=writer,
            progress=progress,
            checkpointer=checkpointer,
            kept=made.kept,
            keep=_behind(keeper, written, warm, batches),
            tiers=lambda: tiers(pages >> room.halved, keeper, warm),
            beside=_beside(warm, workdir, checkpointer),
            told={"warm": warm.told} if warm else {},
            written=written,
            alarm=config.cache.alarm or (0.0 if made.learns else alarm_of(config.cache.codec)),
            alarm_advice="lower config.cache.bound" if made.learns else _NOT_ITS_OWN,
            evaluate_now=_evaluation(scorer, config, made.params, room),
            grow=room.grow,
            learning_rate=made.learning_rate,
            flops_per_step=_introduce(run, made, batches, source_of_peak, progress.log),
            steps=run.steps,
            peak_flops=peak,
            best=extra.get("best"),
            worse=extra.get("worse", 0),
        )
        begin = time.perf_counter()
        # Tightly around the loop: a failure here is told to peers before anything waits for them.
        with distributed.guard_peers(), _memory_explained(run, batches, foreseen):
            why = _catch_up(hooks, state, start, extra)
            if not why:
                state, why = loop.train(
                    state, made.step, batches, _schedule(run, workdir), hooks,
                    start=start, leaves=made.leaves, room=room,
                )  # fmt: skip
        seconds = time.perf_counter() - begin
        checkpointer.close()
        report = hooks.last_report
        if why != "preempted" and scorer is not None:
            _draw_sheet(run, state, scorer, workdir / "sheet.png", writer, progress.log)
        plan = foresight.beside(foreseen, _compiled_peak(made), hooks.step_ms)
        if plan and why != "preempted":
            progress.log(foresight.beside_line(plan))
        return room.mended(state), _result(run, state, why, seconds, report) | {"plan": plan}


def _draw_sheet(
    run: Run,
    state: TrainState,
    scorer: Scorer | pair_run.PairScorer,
    path: pathlib.Path,
    writer: MetricWriter,
    say: Callable[[str], None],
) -> None:
    """A picture that can't be drawn must not cost a finished run its result."""
    try:
        if isinstance(scorer, pair_run.PairScorer):
            drawn, why = scorer.sheet(path), "nothing was evaluated"
        else:
            model = run.answering(state)
            assert isinstance(model, Loaded)
            drawn = sheets.contact_sheet(model.short_answers, scorer.dataset, path)
            why = "no record of one picture and one question"
        if not drawn:
            say(f"no contact sheet: {why}")
            return
        if not jax.process_index():
            writer.images(run.steps, "eval/sheet", sheets.pixels(path))
        say(f"contact sheet: {path}")
    except (OSError, DataError) as error:
        say(f"no contact sheet: {error}")


def _result(
    run: Run, state: TrainState, why: str, seconds: float, report: Report | None
) -> dict[str, Any]:
    blind = report.blind if report else {}
    return {
        "step": int(jax.device_get(state.step)),
        "ended": why,
        "seconds": seconds,
        "skipped_updates": int(jax.device_get(state.guard.skipped)),
        "skipped_records": len(run.dataset.problems) + len(run.dataset.skipped),
        **(report.metrics if report else {}),
        **{f"blind/{name}": value for name, value in blind.items()},
    }


def _first_state(
    run: Run, made: training.Training, checkpointer: Checkpointer, say: Callable[[str], None]
) -> tuple[TrainState, int, dict[str, Any]]:
    """The state to go on from, its step, and what was saved beside it."""
    found = checkpointer.restore(made.kept(made.abstract))
    if found is not None:
        start = resume_step(found.extra["data"], run.dataset.fingerprint())
        say(f"resuming at step {start} of {run.steps}")
        return made.whole(found.state), start, found.extra
    seed = run.config.seed
    if run.config.init_from:
        folder = pathlib.Path(run.config.init_from) / "checkpoints"
        old = record.check_same_model(run.config.init_from, run.config)
        base, cut = run.model.base(), run.config.network.vision.trunk
        wanted = run.model.abstract() if old.lora.rank else trunk.shapes(base, old.vision.trunk)
        params = restore_params(folder, wanted, "latest", on_warning=say)
        if not old.lora.rank:
            params = params if cut == old.vision.trunk else trunk.onto(base, params, cut)
            params = run.model.with_adapters(run.model.stored(params), seed)
        say(f"weights from {run.config.init_from}")
    elif run.dual is not None and (run.dual.towers or run.dual.of_run):
        params = run.dual.read_params(run.model, seed)
        if run.dual.of_run:
            say(f"weights of vision from {run.dual.of_run}")
        for tower, source in run.dual.towers.items():
            say(f"weights of {tower} from {source.weights}")
    elif run.source is not None:
        params = adapters.read_params(run.source, run.model, seed)
        say(f"weights from {run.source.weights}")
        if run.config.network.lora.checkpoint:
            say(adapters.origin(run.config.network.lora))
    else:
        params = run.model.init(seed)
    return made.init(params), 0, {}


def _catch_up(hooks: RunHooks, state: TrainState, start: int, extra: dict[str, Any]) -> str:
    """The evaluation that a SIGTERM kept from its step; "no better" where it ends the run."""
    every = hooks.config.eval_every
    due = start == hooks.steps or (every > 0 and start % every == 0)
    if start and due and extra.get("evaluated") != start:
        hooks.evaluate(start, state)
    return "no better" if start and hooks.exhausted() else ""


def _scorer(run: Run) -> Scorer | pair_run.PairScorer | None:
    """What evaluates the run, or ``None`` without evaluation data."""
    config = run.config
    if not config.data.eval:
        return None
    if of_vectors(config):
        scorer: Any = pair_run.scorer(config, run.model, run.dataset.queries.rows)
    else:
        dataset = make_dataset(config, config.data.eval, run.tokenizer, run.pictures)
        scorer = Scorer(run.model, dataset, config.data.batch_size)
    metric = config.checkpoint.metric
    if metric not in scorer.metrics:  # now, not after hours
        known = ", ".join(scorer.metrics)
        raise ConfigError(f"config.checkpoint.metric={metric!r} is not evaluated; known: {known}")
    return scorer


def _evaluation(
    scorer: Scorer | pair_run.PairScorer | None,
    config: TrainConfig,
    params: Callable[[TrainState], Any],
    room: Room,
) -> Callable[[TrainState, bool], Report] | None:
    if scorer is None:
        return None

    def report(state: TrainState, blind: bool) -> Report:
        return scorer.report(params(state), config.eval_records, blind)

    def evaluate(state: TrainState, blind: bool) -> Report:
        if config.cache.spare_evaluations:
            room.give_back(state)
        while True:
            try:
                return report(state, blind)
            except jax.errors.JaxRuntimeError as error:
                one = jax.process_count() == 1  # others would not know that this one begins again
                if not (one and programs.is_out_of_memory(error) and room.give_back(state)):
                    raise
            # Out here, where the error holds nothing of what was tried in memory.
            room.say("an evaluation is short of memory: once more, without pages of visual tokens")

    return evaluate


def _warm(
    run: Run,
    workdir: pathlib.Path,
    start: int,
    wanted: dict[str, Any] | None,
    say: Callable[[str], None],
    stack: contextlib.ExitStack,
) -> Warm | None:
    """Tokens of a tower that learns in host memory, those of the checkpoint too."""
    warm = open_warm(run.cache_inputs, say)
    if warm:
        stack.callback(warm.close)
        warm.load(saved_in(workdir), start, wanted)
    elif wanted:
        say(
            f"{saved_in(workdir) / str(start)}: visual tokens in host memory that the checkpoint "
            "goes with are left out, for these settings keep none there; losses differ from those "
            "of the run as it was"
        )
    return warm


def _beside(
    warm: Warm | None, workdir: pathlib.Path, checkpointer: Checkpointer
) -> Callable[[int], None]:
    """Saves what a checkpoint goes with; see ``RunHooks.beside``."""

    def save(step: int) -> None:
        if not jax.process_index():
            warm_files.prune(saved_in(workdir), step, checkpointer.all_steps())
        if warm is not None:
            warm.save(saved_in(workdir), step)

    return save


def _schedule(run: Run, workdir: pathlib.Path) -> loop.Schedule:
    config = run.config
    return loop.Schedule(
        steps=run.steps,
        log_every=config.log_every,
        eval_every=config.eval_every,
        save_every=config.checkpoint.every,
        max_bad_steps=config.max_bad_steps,
        profile=config.profile_steps,
        profile_folder=str(workdir / "profile"),
    )


def _compiled_peak(made: training.Training) -> int:
    """Bytes of a device that the largest of the run's programs needs; 0: not known."""
    return max((programs.memory(x).get("peak", 0) for x in made.step.compiled.values()), default=0)


@contextlib.contextmanager
def _memory_explained(run: Run, batches: _GlobalBatches, foreseen: foresight.Foreseen | str) -> Any:
    """An out-of-memory error says what filled the memory and what to change."""
    made = run.training
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not programs.is_out_of_memory(error) or batches.last is None:
            raise
        compiled = list(made.step.compiled.values())
        memory = programs.memory(compiled[-1]) if compiled else {}
        work = max(
            (n for name, n in memory.items() if name.endswith(("temporary", "program"))), default=0
        )
        text = programs.explain_out_of_memory(
            made.abstract,
            batches.last,
            {"activations and work space": work},
            _ADVICE_OF_PAIRS if isinstance(batches.last, Pairs) else _ADVICE,
        )
        if better := foresight.instead(run, foreseen):
            text = f"{text}. {better}"
        raise loop.TrainingStopped(text) from error


def _introduce(
    run: Run,
    made: training.Training,
    batches: _GlobalBatches,
    peak: str,
    say: Callable[[str], None],
) -> count.Flops:
    """Say what is about to run; returns the FLOPs of a mean step, judged by its first batch.

    ``peak`` says where MFU's denominator is from.
    """
    local, rows = batches.peek(), run.config.data.batch_size
    scale = rows / len(run.rows)
    flops = made.flops_per_step(local, scale)
    size = sum(int(np.prod(x.shape)) for x in run.model.shapes.values())
    trained = sum(int(np.prod(run.model.shapes[path].shape)) for path in made.leaves)
    meshes = ", vision tower on ".join(map(mesh_text, run.meshes))
    say(f"{size:,} parameters, {trained:,} trained; mesh {meshes}")
    what = f"{flops.total / 1e9:.2f} GFLOP a step; MFU against {peak}"
    if isinstance(local, Pairs):
        for line in pair_run.introduction(run, local):
            say(line)
        say(what)
        _say_problems(run, say)
        return flops
    tokens = float((np.asarray(local.segment) > 0).sum()) * scale
    say(
        f"{len(run.dataset.records):,} records, {len(run.dataset.corpus.paths):,} pictures; "
        f"{run.steps} steps of {rows} rows x {local.tokens.shape[1]} tokens, "
        f"{100 * tokens / (rows * local.tokens.shape[1]):.0f} % filled; {what}"
    )
    _say_unknown(run, say)
    _say_problems(run, say)
    return flops


def _say_problems(run: Run, say: Callable[[str], None]) -> None:
    if found := run.dataset.problems:
        say(f"{len(found)} records are skipped; the first: {found[0]}")


def _say_unknown(run: Run, say: Callable[[str], None]) -> None:
    """Name what the tokenizer has no word for, where it is trained on."""
    corpus = run.dataset.corpus
    lost = int(np.sum(corpus.loss & (corpus.tokens == run.tokenizer.unk_id)))
    if lost:
        say(
            f"{lost} trained tokens of different texts are <unk>, words that the tokenizer does "
            "not have; raise config.tokenizer.vocab_size or set config.tokenizer.kind=bpe"
        )


def _written(
    run: Run, made: training.Training, room: Room, stack: contextlib.ExitStack
) -> Written | None:
    """What knows which pages are written, told to the data and to what may give them back.

    ``None`` too where processes share rows: what each knows, and when, may differ.
    """
    written = written_of(run.config.cache, run.slots, made.learns)
    if written is None or share_rows(run.cache_inputs):
        return None
    run.dataset.leave_out(written)
    stack.callback(run.dataset.leave_out, None)
    room.gone = written.forget
    return written


def _behind(
    keeper: Keeper | None, written: Written | None, warm: Warm | None, batches: _GlobalBatches
) -> Callable[[Any], float]:
    """Takes the batch that was taken last, and its tokens; see ``RunHooks.keep``."""

    def keep(tokens: Any) -> float:
        if written is not None:
            assert isinstance(batches.local, Batch)  # pairs have no pages
            written.take(batches.local)
        if warm is not None:
            warm.take(batches.given, tokens)
        if keeper is None:
            return 0.0
        local, given = [batches.local], [tokens]
        if isinstance(batches.local, Pairs) and tokens:
            local, given = [batches.local.query, rows_of(batches.local.document)], tokens
        for rows, made in zip(local, given):
            if made is not None and isinstance(rows, Batch):
                keeper.take(rows, made)
        return keeper.change()

    return keep


class _GlobalBatches:
    """Local rows placed on the mesh as they are taken."""

    def __init__(self, source: TrainBatches, place: Callable[[Any], Any], warm: Warm | None):
        self.source, self.place, self._warm = source, place, warm
        self._peeked: tuple[Any, Batch | Pairs] | None = None
        self._taken = source.state()
        self.last: Batch | Pairs | None = None
        self.local: Batch | Pairs | None = None
        """This process's rows of ``last``, numpy."""
        self.given: Any = None
        """Those as the source gave them."""

    def __iter__(self) -> _GlobalBatches:
        return self

    def __next__(self) -> Batch | Pairs:
        self.local = self.peek()
        assert self._peeked is not None
        self.given, _ = self._peeked
        self._peeked, self._taken = None, self.source.state()
        self.last = self.place(self.local)
        return self.last

    def peek(self) -> Batch | Pairs:
        """The next batch's local rows, not taken yet."""
        if self._peeked is None:
            given: Any = next(self.source)[0]
            self._peeked = given, self._warm.fill(given) if self._warm else given
        return self._peeked[1]

    def state(self) -> dict[str, Any]:
        """The iterator's state after the batches that were taken."""
        return self._taken
