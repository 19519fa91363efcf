"""Run some steps of what users would pick instead, on the texts and the model in FOLDER.

torchrun --standalone --nproc-per-node N bench/peers.py ARM FOLDER fp32|bf16|fp16 ROWS MAX_STEPS

- original: a plain FSDP-era script: every text padded to max_length, the model's own loss,
  `.item()` after each micro-batch
- dynamic, grouped, packed: transformers' Trainer with padding to the longest text of the batch, with
  train_sampling_strategy="group_by_length", and on blocks of max_length tokens that span documents
- trl: SFTTrainer with packing=True

All of them compute on the GPU of their rank where one is visible, else on the CPU. Prints one JSON
object: time and real tokens of each optimizer step (all ranks), the first step's loss and the
process's peak memory.
"""

import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

TEXTS, MAX_LENGTH, RATE = 4, 512, 1e-4


def own_device():
    "Return the device of this rank, on which `Trainer` computes as well."
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def now(device):
    "Return the time at which all queued work is done."
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
    return time.time()


def report(times, tokens, first_loss):
    device = own_device()
    # where the group is NCCL's, as Trainer makes it, it takes no tensors of the host
    counts = torch.tensor(tokens, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(counts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type != "cpu":
        peak = torch.get_device_module(device).max_memory_allocated(device)
    if int(os.environ.get("RANK", 0)) == 0:
        print(
            json.dumps(
                {
                    "times": times,
                    "tokens": counts.tolist(),
                    "first_loss": first_loss,
                    "peak_bytes": peak,
                }
            ),
            flush=True,
        )


def tokenized(folder, tokenizer):
    texts = json.load(open(os.path.join(folder, "texts.json")))
    return [
        ids + [tokenizer.eos_token_id] if len(ids) < MAX_LENGTH else ids
        for ids in tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    ]


def original(folder, dtype, rows, max_steps):
    from torch.nn.parallel import DistributedDataParallel

    device = own_device()
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    padded = tokenizer(
        json.load(open(os.path.join(folder, "texts.json"))),
        truncation=True,
        max_length=MAX_LENGTH,
        padding="max_length",
        return_tensors="pt",
    )
    model = DistributedDataParallel(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    order = torch.randperm(len(padded["input_ids"]), generator=torch.Generator().manual_seed(0))[
        rank::size
    ]
    times, tokens, first_loss = [], [], None
    for chosen in order.split(TEXTS)[:max_steps]:
        ids, mask = (padded[name][chosen].to(device) for name in ("input_ids", "attention_mask"))
        loss = model(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss
        loss.backward()
        first_loss = first_loss or loss.item()
        loss.item()
        tokens.append(int(mask.sum()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(now(device))
    report(times, tokens, first_loss)


class Clock(TrainerCallback):
    def __init__(self):
        self.times, self.first_loss = [], None

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(now(args.device))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.first_loss is None and "loss" in (logs or {}):
            self.first_loss = float(logs["loss"])


class Counting:
    "A collator that counts the real tokens of each micro-batch."

    def __init__(self, inner):
        self.inner, self.counts = inner, []

    def __call__(self, features):
        batch = self.inner(features)
        self.counts.append(int((batch["labels"] != -100).sum()))
        return batch

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


def arguments(arm, folder, dtype, rows, max_steps, kind=TrainingArguments, **more):
    return kind(
        output_dir=os.path.join(folder, "out"),
        per_device_train_batch_size=rows if arm in ("packed", "trl") else TEXTS,
        max_steps=max_steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        use_cpu=own_device().type == "cpu",
        gradient_checkpointing=False,
        dataloader_drop_last=True,
        **({"ddp_backend": "gloo"} if own_device().type == "cpu" else {}),
        **more,
    )


def trainer(arm, folder, dtype, rows, max_steps):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    clock = Clock()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    if arm == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_dict({"text": json.load(open(os.path.join(folder, "texts.json")))})
        args = arguments(
            arm,
            folder,
            dtype,
            rows,
            max_steps,
            SFTConfig,
            packing=True,
            max_length=MAX_LENGTH,
            dataset_text_field="text",
        )
        job = SFTTrainer(
            model=model,
            args=args,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        job.data_collator = collator = Counting(job.data_collator)
    else:
        data = tokenized(folder, tokenizer)
        if arm == "packed":
            flat = [token for ids in data for token in ids]
            data = [
                flat[i : i + MAX_LENGTH] for i in range(0, len(flat) - MAX_LENGTH + 1, MAX_LENGTH)
            ]
        data = [
            {"input_ids": ids, "length": len(ids)} if arm == "grouped" else {"input_ids": ids}
            for ids in data
        ]
        collator = Counting(DataCollatorForLanguageModeling(tokenizer, mlm=False))
        grouping = {"train_sampling_strategy": "group_by_length"} if arm == "grouped" else {}
        job = Trainer(
            model=model,
            args=arguments(arm, folder, dtype, rows, max_steps, **grouping),
            train_dataset=data,
            data_collator=collator,
            callbacks=[clock],
            processing_class=tokenizer,
        )
    job.train()
    steps = len(clock.times)
    report(clock.times, collator.counts[:steps], clock.first_loss)


if __name__ == "__main__":
    # `rows` are those of a micro-batch, for packed and trl
    arm, folder, dtype, rows, max_steps = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    (original if arm == "original" else lambda *rest: trainer(arm, *rest))(
        folder, dtype, rows, max_steps
    )
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)
