"""The sections of a run that do not depend on its model. No jax, no I/O."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, axis, key
from nash_mhc.config.logs import HELP, LEVELS

TEMPLATE = "{role}: {content}\n"  # default template of a message
TOKENIZER = "tokenizer"  # value of --template: the tokenizer's chat template


@dataclass(frozen=True)
class DataConfig(Section):
    section = "data"

    dataset: str = key(
        "stories",
        "data to train on: stories (built in), a prepared folder, text, .jsonl or .parquet files (.gz, .zst), a folder or "
        "glob of them, or a Hugging Face dataset; repeat with weights (a:0.7) for a mixture",
        seam="sources",
        weighted=True,
        path=True,
    )
    dataset_name: str | None = key(None, "subset (configuration) of a Hugging Face dataset")
    split: str = key("train", "split to train on")
    eval_split: str = key("validation", "split to evaluate on; never used for training")
    validation_fraction: float = key(
        0.05, "fraction of the documents to hold out if the data has no evaluation split (0: none)", low=0, high=0.9
    )
    text_field: str = key("text", "JSON field or table column that holds the text")
    extensions: str | None = key(
        None, "file extensions to read from a folder, such as .md,.py (default: known text and data formats)"
    )
    format: str = key(
        "auto",
        "format of a record: text, prompt (and response), chat, fields (for templates), or puzzle (CSV); auto: detected "
        "from the first record",
        choices=("auto", "text", "prompt", "chat", "fields", "puzzle"),
    )
    template: str | None = key(
        None, "template of a message, with {role} and {content}; `tokenizer` uses the tokenizer's chat template"
    )
    loss_on: str = key("response", "tokens that count in the loss of prompt and chat data", choices=("response", "all"))
    prompt_template: str | None = key(
        None, r"template of the prompt for --format fields, such as 'Q: {question}[\nHint: {hint}]\n'; text in [ ] is "
            r"omitted if its field is missing",
        further="tuning",
    )  # fmt: skip
    response_template: str | None = key(
        None, "template of the response for --format fields; only the response counts in the loss", further="tuning"
    )
    test_fraction: float = key(
        0.0, "fraction of the documents to hold out for the test at the end of the run", low=0, high=0.9, further="tuning"
    )
    test_split: str | None = key(
        None,
        "split to test on at the end of the run (none: no test, unless --test-fraction is set). If the data has no such "
        "split, --test-fraction creates it",
        further="tuning",
    )
    max_documents: int | None = key(None, "read at most this many documents (none: all)", low=1)
    tokenizer: str = key(
        "bytes", "tokenizer: bytes (built in), a tokenizer.json, a folder with one, or a Hugging Face name", path=True
    )
    begin_with_end: bool = key(
        True,
        "start each document with the end-of-text token if the tokenizer has no begin (BOS) token; false by default for "
        "tokenizers of Hugging Face models",
        further="tuning",
    )
    streaming: bool = key(False, "pack sequences during training instead of preparing the data first")
    cache_dir: str = key(".cache/data", "folder for prepared datasets", path=True)
    batch_size: int = key(8, "sequences per forward pass over all devices; a step has batch-size x grad-accum sequences", low=1)
    seq_len: int = key(256, "tokens per sequence (T)", low=2)
    num_workers: int = key(0, "worker processes for the input pipeline (0: threads)", low=0, high=256)
    worker_buffer_size: int = key(4, "batches to prefetch per worker", low=1, high=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        templates = {"--prompt-template": self.prompt_template, "--response-template": self.response_template}
        if self.format == "fields":
            if missing := [flag for flag, template in templates.items() if template is None]:
                raise ConfigError(
                    f"--format fields needs {missing[0]}; write it with the fields of a record, such as {{question}}"
                )
            if self.template not in (None, TOKENIZER):
                raise ConfigError(
                    f"--format fields uses --prompt-template and --response-template, not --template {self.template}; "
                    f"leave --template out, or use --template {TOKENIZER}"
                )
        elif given := [flag for flag, template in templates.items() if template is not None]:
            raise ConfigError(f"{given[0]} needs --format fields; add --format fields, or leave out {given[0]}")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ConfigError(
                f"--validation-fraction {self.validation_fraction:g} and --test-fraction {self.test_fraction:g} leave no "
                "documents to train on; lower one of them"
            )

    @property
    def test_part(self) -> str | None:
        """Return the name of the test split, or None."""
        return self.test_split or ("test" if self.test_fraction else None)


PLATFORMS = ("tpu", "gpu", "cpu")  # the order of `auto`


@dataclass(frozen=True)
class MeshConfig(Section):
    section, prefixed = "mesh", True

    # Mesh axes, outermost first. A new axis needs a line here and its name in RULES of parallel/sharding.py.
    data: int = axis("number of data-parallel replicas, each with a part of the batch (-1: fill the remaining devices)")
    fsdp: int = axis("devices to split the parameters and the batch over (-1: fill the remaining devices)")
    tp: int = axis("devices to split heads, MLP and vocabulary over (-1: fill the remaining devices)")
    num_devices: int | None = key(
        None, "maximum number of devices to use (none: 1 without --mesh flags, else all); a CPU emulates devices", low=1,
        flag="num-devices",
    )  # fmt: skip
    platform: str = key(
        "auto",
        "device type: tpu, gpu, cpu, or several in order of preference, such as tpu,cpu; auto: tpu,gpu,cpu",
        flag="platform",
    )
    profile_for: str | None = key(
        None,
        "use the default batch size and learning rate for this device type (unrelated to --profile); your own flags override "
        "them",
        choices=PLATFORMS,
        flag="profile-for",
        further="defaults",
    )
    coordinator_address: str | None = key(
        None, "HOST:PORT of process 0 (none: as set by the scheduler, if any)", flag="coordinator-address"
    )
    num_processes: int | None = key(
        None,
        "number of processes of the run (1: ignore the scheduler; none: as set by the scheduler, if any)",
        low=1,
        flag="num-processes",
    )
    process_id: int | None = key(None, "index of this process, from 0", low=0, flag="process-id")
    connect_timeout: float = key(60.0, "seconds to wait for the other processes at the start", above=0, flag="connect-timeout")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in self.axes.items():
            if size == 0:
                raise ConfigError(f"mesh.{name} must be a positive number of devices, or -1 for all remaining ones, not 0")
        if unknown := [name for name in self.platforms if name not in PLATFORMS]:
            raise ConfigError(
                f"mesh.platform {self.platform!r}: must be auto, or some of {', '.join(PLATFORMS)} in order of preference, "
                f"not {unknown[0]!r}"
            )
        rest = [name for name, size in self.axes.items() if size == -1]
        if len(rest) > 1:
            raise ConfigError(
                f"only one mesh axis may be -1 (all remaining devices), not {' and '.join('mesh.' + n for n in rest)}"
            )

    @property
    def platforms(self) -> tuple[str, ...]:
        """Return the device types in order of preference."""
        return PLATFORMS if self.platform == "auto" else tuple(name.strip() for name in self.platform.split(","))

    @property
    def axes(self) -> dict[str, int]:
        """Return the number of devices along each axis, in mesh order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["axis"]}

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.axes.values()))} ({' x '.join(self.axes)})"


# Activations that --remat-keep can save for the backward pass; `model/remat.py` implements them.
KEEPABLE = ("qkv", "attention", "mixed", "output", "ffn-up", "ffn-down", "read", "coefficients")


@dataclass(frozen=True)
class TrainConfig(Section):
    section = "train"

    total_steps: int = key(300, "optimizer steps of the whole run", low=1)
    epochs: float | None = key(None, "passes over the data; sets --total-steps", above=0, further="tuning")
    patience: int = key(
        0, "stop after this many evaluations in a row without a lower held-out loss (0: never)", low=0, further="tuning"
    )
    end_with: str = key(
        "auto",
        "checkpoint to use as the final one: last, or best by held-out loss (auto: best with --lora-rank, --epochs or "
        "--patience, else last)",
        choices=("auto", "last", "best"),
        further="tuning",
    )
    seed: int = key(0, "seed of the weights and of the data order", low=0, high=2**32 - 1)
    grad_accum: int = key(1, "microbatches per step (gradient accumulation)", low=1)
    remat: str = key(
        "auto",
        "activations to recompute in the backward pass: none, all but matmul results (dots), or all (full); auto: the fastest "
        "choice that fits",
        choices=("auto", "none", "dots", "full"),
    )
    remat_keep: str | None = key(
        None,
        f"more activations to save under --remat dots or full, comma-separated: {', '.join(KEEPABLE)} "
        "(explained in docs/performance.md)",
        further="precision",
    )
    dtype: str = key("auto", "compute dtype; auto: float32 on CPU, bfloat16 elsewhere", choices=("auto", "float32", "bfloat16"))
    matmul_dtype: str = key(
        "compute",
        "dtype of attention and MLP matmuls: `compute` (the compute dtype) or `float8` (faster on Hopper and newer)",
        choices=("compute", "float8"),
        further="precision",
    )
    attention: str = key(
        "auto", "attention kernel; auto: the fastest on this platform", choices=("auto", "xla", "cudnn", "splash")
    )
    deterministic: bool = key(
        True, "bitwise reproducible results; on a GPU, takes more memory and is slower for long sequences"
    )
    unroll: str = key(
        "auto",
        "unroll the layers instead of scanning over them: slower to compile, faster on a GPU (auto: yes on a single GPU)",
        choices=("auto", "yes", "no"),
    )
    log_interval: int = key(20, "steps between rows of metrics.jsonl", low=1)
    eval_interval: int = key(150, "steps between evaluations (0: only at the end)", low=0)
    eval_batches: int = key(16, "batches per evaluation", low=1)
    checkpoint_interval: int = key(150, "steps between checkpoints (0: only at the end)", low=0)
    checkpoint_dir: str | None = key(
        None, "run directory; an existing run is resumed (none: runs/SIZE-DATE-TIME)", path=True, remote=True
    )
    max_bad_steps: int = key(10, "stop after this many consecutive steps with a non-finite loss or gradient (0: never)", low=0)
    on_spike: str = key(
        "report",
        "if loss or gradient norm rises suddenly: report it, report it and skip the update, or ignore it",
        choices=("report", "skip", "ignore"),
    )
    spike_score: float = key(
        20.0, "number of robust standard deviations above the median of recent steps that counts as a spike", above=0
    )
    stall_timeout: float = key(
        600.0, "seconds without progress after which the run reports the stuck process and exits (0: never)", low=0
    )
    keep_last: int = key(3, "number of latest checkpoints to retain, in addition to the best one by held-out loss", low=1)
    keep_every: int = key(0, "also retain checkpoints at multiples of this many steps (0: none)", low=0)
    resume: str = key(
        "auto",
        "auto: resume from the latest complete checkpoint, if any; must: fail if there is none; never: fail if there is one",
        choices=("auto", "never", "must"),
    )
    resume_from: str | None = key(
        None,
        "run directory to continue from: its weights, optimizer state, schedule and step count; writes to --checkpoint-dir",
        path=True,
        remote=True,
    )
    init_from: str | None = key(
        None,
        "run directory or Hugging Face folder with the initial weights; without --dataset, the data of that run is used, too",
        path=True,
        remote=True,
    )
    init_step: int | None = key(None, "checkpoint of --init-from to use (none: the run's final one)", low=0)
    wait_for_lock: float = key(0.0, "seconds to wait if another run uses --checkpoint-dir (0: exit at once)", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume == "never" and self.resume_from is not None:
            raise ConfigError("--resume never cannot be combined with --resume-from; leave out one of them")
        if self.resume_from is not None and self.init_from is not None:
            raise ConfigError(
                "--resume-from continues a run, --init-from starts a new one from its weights; give only one of them"
            )
        if unknown := [name for name in self._kept_names if name not in KEEPABLE]:
            raise ConfigError(f"train.remat_keep: unknown activation {unknown[0]!r}; choose from {', '.join(KEEPABLE)}")
        if self.remat_keep is not None and self.remat in ("auto", "none"):
            raise ConfigError(
                f"train.remat_keep: needs --remat dots or full, not {self.remat}; leave out --remat-keep, or set --remat"
            )
        if self.init_step is not None and self.init_from is None:
            raise ConfigError(
                "--init-step selects a checkpoint of --init-from, which is missing; add --init-from, or leave out --init-step"
            )

    @property
    def _kept_names(self) -> list[str]:
        return [] if self.remat_keep is None else [name.strip() for name in self.remat_keep.split(",")]

    @property
    def kept(self) -> str:
        """Return the remat choice with the extra saved activations: `dots`, `dots+ffn-up`.

        `auto` counts as `none` until `resolve` (train/inputs.py) has replaced it.
        """
        if self.remat == "auto":
            return "none"
        return "+".join([self.remat, *([",".join(sorted(self._kept_names))] if self.remat_keep else [])])


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    section = "objective"

    name: str = key(
        "next_token",
        "objective to minimize: next_token, or a registered one",
        flag="objective",
        seam="objectives",
    )


@dataclass(frozen=True)
class LoraConfig(Section):
    section, prefixed = "lora", True

    rank: int = key(0, "LoRA rank; only adapters are trained (0: no LoRA, train all weights)", low=0)
    alpha: float | None = key(None, "LoRA alpha: adapters are scaled by alpha / rank (none: twice the rank)", above=0)
    dropout: float = key(0.0, "dropout of the adapters' inputs", low=0, high=0.9)
    targets: str = key(
        "all", "LoRA targets: all, attention, mlp, or comma-separated names such as q_proj,v_proj or those of parameters.txt"
    )
    rslora: bool = key(False, "scale adapters by alpha / sqrt(rank), for large ranks")
    base_dtype: str = key("float32", "dtype of the frozen base weights", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(word.strip() for word in self.targets.split(",")):
            raise ConfigError(f"--lora-targets {self.targets}: contains an empty name; separate names with single commas")


@dataclass(frozen=True)
class PrecisionConfig(Section):
    section = "precision"

    weights_dtype: str = key(
        "float32",
        "dtype in which matrices and embeddings are stored; bfloat16 halves their memory, with stochastic rounding",
        choices=("float32", "bfloat16"),
    )
    moments_dtype: str = key(
        "float32", "dtype of the optimizer moments of matrices and embeddings", choices=("float32", "bfloat16")
    )


@dataclass(frozen=True)
class TelemetryConfig(Section):
    section = "telemetry"

    wandb: str | None = key(None, "Weights & Biases project to log to (none: do not log)")
    wandb_mode: str = key(
        "online", "offline: write to the run directory, for a later `wandb sync`", choices=("online", "offline")
    )
    log_format: str = key("text", "json: one JSON object per line on stdout", choices=("text", "json"))
    log_level: str = key("info", HELP, choices=LEVELS)
    profile: str | None = key(None, "steps to profile, such as 50:55; writes a trace and prints the ten most expensive parts")
    sample_tokens: int = key(160, "tokens to generate as a sample at every evaluation (0: no sample)", low=0)
    sample_prompt: str | None = key(None, "prompt of the samples (none: begin a new document)")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.profiled

    @property
    def profiled(self) -> tuple[int, int] | None:
        """Return the first and the last step to profile."""
        if self.profile is None:
            return None
        first, colon, last = self.profile.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise ConfigError(f"telemetry.profile {self.profile!r}: must be the first and the last step, such as 50:55")
        return int(first), int(last)
