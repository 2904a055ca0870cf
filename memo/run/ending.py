"""How a run saves and how it ends: whatever ends it, the steps done are saved first."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from memo.checkpoint import checkpoint
from memo.checkpoint.manifest import last_good
from memo.errors import BadState, CheckpointError, ConfigError, DataError, RunFailed, TrainingError, reason
from memo.run import report
from memo.run.reserve import naming_region
from memo.run.state import Run, rescues
from memo.run.watch import Watch
from memo.system.command import StepGivenUp, StopSignal, handling, progress
from memo.system.launch import of_first, together

MOST_FAILED_SAVES = 5  # in a row: a run whose work cannot be saved stops


def save(run: Run) -> None:
    """Starts to save the steps done; warns where the save before failed. Errors: TrainingError: too often."""
    try:
        run.saver.wait()
        run.failed_saves = 0
    except CheckpointError as e:
        run.failed_saves += 1
        if run.failed_saves == MOST_FAILED_SAVES:
            raise TrainingError(f"{run.failed_saves} saves in a row failed: {e}") from None
        if run.speaks:
            print(f"\nwarning: {e}; training goes on", file=sys.stderr)
    run.saver.save(run.optimizer.pieces(saved=True), run.stored, run.done)


def save_and_wait(run: Run, saver: checkpoint.Saver) -> None:
    """Saves the steps done, to the last byte, on all ranks. Errors: ConfigError, on all ranks."""
    saver.save(run.optimizer.pieces(saved=True), run.stored, run.done)
    with progress(lambda: f"writing {saver.folder}", run.speaks):
        together(run.mesh.host, saver.wait)


def save_last(run: Run) -> None:
    """Saves the steps done, here or elsewhere, and waits. Errors: TrainingError, on all ranks: not here."""
    with contextlib.suppress(CheckpointError):  # of the save before
        run.saver.wait()
    try:
        save_and_wait(run, run.saver)
        if of_first(run.mesh.host, report.keep_folder, run):  # lost since
            save_and_wait(run, run.saver)
        return
    except (ConfigError, OSError) as e:
        error = str(e)
    folder = None
    with contextlib.suppress(OSError):
        if run.speaks and run.one_host:  # a temporary folder is of one host
            start, others = rescues(run.out)
            folder = Path(tempfile.mkdtemp(prefix=start))
    folder = run.mesh.host.objects(folder)[0]
    if folder is None:
        raise TrainingError(error)
    try:
        save_and_wait(run, checkpoint.Saver(folder, run.saver.ranks, run.cfg.pin_memory,
                                            copies=run.saver.copies))
    except ConfigError as e:
        if run.speaks:
            shutil.rmtree(folder, ignore_errors=True)
        raise TrainingError(f"{error}; nor could it be saved elsewhere: {e}") from None
    if run.speaks:
        run.attempt("config.json", report.furnish, run, folder)
        for old in others[run.cfg.keep_checkpoints - 1:]:
            shutil.rmtree(old, ignore_errors=True)
    raise TrainingError(f"{error}; {run.done} steps are saved in {folder} instead; "
                        f"go on with: {report.go_on_with(run, folder)}")


def save_after(run: Run, e: Exception) -> None:
    """Saves the steps done before the run ends with `e`, if the state is good and all ranks are there."""
    all_here = run.mesh.host.size == 1 or isinstance(e, TrainingError)
    if not run.whole or run.done == run.first or isinstance(e, BadState) or not all_here:
        return
    try:
        save_last(run)
        line = f"{run.done} steps are saved in {run.out}; go on with: {report.go_on_with(run, run.out)}"
    except Exception as again:  # a device that is lost, say
        line = f"after {run.done} steps: {reason(again)}"
    if run.speaks:
        print(line, file=sys.stderr)


def not_finite(run: Run, loss: float, grad_norm: float) -> BadState:
    """Makes the error of a step whose loss or gradient norm is not finite."""
    run.saver.join()  # the save under way is of a good state
    it, offsets = run.step, run.data.first_tokens(run.cfg, run.step, run.mesh.dp.size)
    return BadState(f"loss={loss} grad_norm={grad_norm} at iter={it} (sequences at tokens {offsets} of the "
                     f"train split) must be finite; nothing was saved over: {last_good(run.out, it)}; "
                     f"{checkpoint.LESS}")


def train_and_save(run: Run, train: Callable, stop: StopSignal) -> None:
    """Calls train(run, stop), then saves. Errors: those of `train`; what can be saved is saved before."""
    with handling(stop), naming_region(run.expected, run.device, "transient"), contextlib.closing(Watch(run)):
        try:
            train(run, stop)
        except StepGivenUp:
            pass
        except Exception as e:
            save_after(run, e)
            # too late to be a user's mistake, but in the data
            if isinstance(e, (ConfigError, OSError)) and not isinstance(e, DataError):
                raise RunFailed(str(e)) from e
            raise
        if run.done > run.first:
            save_last(run)
        stop.number = int(*run.mesh.host.max(stop.number))  # it may have come to some ranks while they saved


def complete(run: Run, train: Callable) -> int:
    """Calls train(run, stop) between first and last lines -> 0, or 128 + the signal that stopped it."""
    cfg = run.cfg
    stop = StopSignal(quiet=not run.speaks, alone=run.mesh.host.size == 1)
    try:
        if run.speaks:
            report.print_first_lines(run)
        if run.first >= cfg.max_iters:
            if run.speaks:
                print(f"max_iters={cfg.max_iters} steps are done already; raise --max_iters to go on")
            return 0
        train_and_save(run, train, stop)
    finally:
        for logger in run.loggers:
            run.attempt(type(logger).__name__, logger.close)
    if run.speaks:
        if stop.number or not cfg.eval_interval:  # otherwise the last step was evaluated, and the loss drawn
            report.draw_loss(run)
        run.attempt("last lines", report.print_last_lines, run, stop.number)
    return 128 + stop.number if stop.number else 0
