"""The axes of the mesh are one table: another axis is one line there, and its name where it shall split something."""

import dataclasses
from dataclasses import dataclass

import pytest
import small

from nash_mhc.config.fields import axis
from nash_mhc.config.schema import ConfigError, MeshConfig
from nash_mhc.parallel import sharding
from nash_mhc.parallel.mesh import describe, make_mesh
from nash_mhc.train.inputs import resolve


@dataclass(frozen=True)
class WithPods(MeshConfig):
    pod: int = axis("devices along pod: groups of them with slow links in between")


BATCHES = [small.random_rows(small.config(), seed) for seed in range(3)]


@pytest.fixture(scope="module")
def one_device():
    """With the table as it is: the program that test_step has compiled."""
    return small.train(small.config(), BATCHES)


@pytest.fixture(autouse=True)
def a_row_more(monkeypatch):
    monkeypatch.setitem(sharding.RULES, "batch", ("pod", *sharding.RULES["batch"]))


def test_a_run_on_a_mesh_of_four_axes_is_the_run_on_one_device(one_device):
    cfg = dataclasses.replace(small.config(), mesh=WithPods(pod=2, fsdp=2, tp=2))
    small.assert_same_run(small.train(cfg, BATCHES), one_device)


def test_messages_and_checks_include_the_axis():
    mesh = WithPods(pod=4, fsdp=2)
    assert describe(make_mesh(mesh)) == "8 x cpu, mesh 1x2x1x4 (data x fsdp x tp x pod)"
    with pytest.raises(ConfigError, match=r"--batch-size 12 cannot be split over pod x data x fsdp = 8"):
        resolve(dataclasses.replace(small.config(data__batch_size=12), mesh=mesh))
    with pytest.raises(ConfigError, match=r"only one mesh axis may be -1 \(all remaining devices\), not mesh.tp and mesh.pod"):
        WithPods(tp=-1, pod=-1)
