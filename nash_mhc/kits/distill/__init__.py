"""Distillation: train a student on the top-k logits of a teacher, cached once or computed online."""

from nash_mhc.config.kits import Command, Figure, Kit

KIT = Kit(
    sections={"distill": "settings:DistillConfig"},
    objectives={"distill": "objective:DISTILL"},
    commands={"distill": Command("cache a teacher's logits, run distillation chains", "nash_mhc.kits.distill.command:main")},
    axes={"candidates": ()},  # top-k tokens of a teacher
    figures={
        "kl": Figure(
            "held-out KL from the teacher, nats/token", chart="KL from the teacher, nats/token", log=True,
            line=", KL from the teacher {eval/kl:.4f}", short="kl {:.4f}",
        ),
    },
)  # fmt: skip
