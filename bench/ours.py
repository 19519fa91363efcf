"""Our step as a run takes it, on ranks that a comparison has started, and what the other side of the
comparison needs: batches and a function for taking turns."""

import copy
import tempfile
import time

import torch
import torch.distributed as dist

from multigpu_ft.data.batches import epoch_steps
from multigpu_ft.data.examples import load_texts
from multigpu_ft.data.order import SampleOrder
from multigpu_ft.data.tokenization import tokenize_texts
from multigpu_ft.distributed.world import join_world, to_device
from multigpu_ft.models.loading import load_model, load_tokenizer
from multigpu_ft.models.loss import LossModel
from multigpu_ft.run.config import RunConfig
from multigpu_ft.run.run_dir import RunDir
from multigpu_ft.tracking.metrics import Interval, RunLog, Stopwatch
from multigpu_ft.training.setup import make_strategy
from multigpu_ft.training.step import make_optimizer, train_step


class Ours:
    "A run of `prepare`'s `folder` under `settings`. `base` is a copy of the model for the other side."

    def __init__(self, folder, **settings):
        self.cfg = cfg = RunConfig(
            model=folder,
            dataset=f"{folder}/texts.jsonl",
            batch_size=6,
            run_root=tempfile.mkdtemp(),
            learning_rate=1e-4,
            **settings,
        )
        self.world, tokenizer = join_world(cfg), load_tokenizer(cfg)
        self._texts = tokenize_texts(load_texts(cfg).texts, tokenizer, cfg.max_length)
        self._order = SampleOrder.of(cfg, len(self._texts), self.world.size)
        self._tracker, self._watch = (
            RunLog(RunDir.create(cfg), self.world.is_main),
            Stopwatch(self.world.device),
        )
        self.base = load_model(cfg, tokenizer)
        self.strategy, _ = make_strategy(cfg, self.world, 0)
        self.strategy.prepare(
            LossModel(copy.deepcopy(self.base)), lambda prepared: make_optimizer(cfg, prepared)
        )
        self.stream, self.tokens = self._steps(), []

    def _steps(self):
        "Yield the steps with one micro-batch, which is what the other side computes."
        place = (self.world.rank, self.world.size)
        for step in epoch_steps(self._texts, self._order, self.cfg, "bucketed", 1, 0, *place):
            if len(step.micro_batches) == 1:
                yield step

    def step(self):
        """Do everything that a run does for a step: cut and distribute the rows, train, agree on
        stopping, sum the loss over the ranks, log a line, and write the heartbeat."""
        interval, step = Interval(self.strategy), next(self.stream)
        loss, norm = train_step(self.strategy, step, 1e-4, 1.0, self._watch)
        interval.add(step, loss)
        self.world.sum(False)
        interval.end(self._watch, norm)
        measured = interval.measure(0.0)
        self._tracker.log({**measured, "time": interval.ended})
        self._tracker.heartbeat(loss=measured["loss"])
        self.tokens.append(step.targets)
        return measured["loss"]

    def batches(self):
        "Return the rows of the whole epoch as token ids and labels."
        found = []
        for step in self._steps():
            batch = to_device(step.micro_batches[0], torch.device("cpu"))
            labels = torch.full_like(batch["input_ids"], -100)
            labels.view(-1)[batch["predictors"] + 1] = batch["targets"]
            found.append((batch["input_ids"], labels))
        return found


def take_turns(ways, steps, tolerance):
    """Take `steps` steps with each of `ways`; they take turns in going first. Returns their seconds.

    Losses may differ by `tolerance` of the loss."""
    seconds = {way: [] for way in ways}
    for number in range(steps):
        losses = []
        for way in ways if number % 2 else ways[::-1]:
            dist.barrier()
            started = time.perf_counter()
            losses.append(way())
            seconds[way].append(time.perf_counter() - started)
        assert abs(losses[0] - losses[-1]) < tolerance * losses[0], losses
    return seconds
