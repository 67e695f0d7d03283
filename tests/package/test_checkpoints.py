"""Checkpoints: what is kept, what is compared, what is damaged, and whose a folder is."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from attnlib.parallel import RankError, claim_folder, load_checkpoint, run, save_checkpoint
from attnlib.parallel.checkpoints import SUMS, finished


@pytest.fixture(autouse=True)
def as_one_process():
    """PyTorch says each time that there is no group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def a_run(kind=torch.optim.AdamW, groups=1, **options):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    parts = [model.parameters()] if groups == 1 else [x.parameters() for x in model]
    optimizer = kind([{"params": list(part)} for part in parts], lr=0.1, **options)
    return model, optimizer


def step(model, optimizer, number, rate=None):
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    if rate:
        rate.step()


KINDS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"capturable": False, "foreach": False}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_goes_on_as_if_nothing_had_been(tmp_path, kind, options, begin):
    """Also from before the first step, which saving must not take."""
    torch.manual_seed(0)
    model, optimizer = a_run(kind, groups=2, **options)
    for number in range(begin):
        step(model, optimizer, number)
    save_checkpoint(tmp_path, begin, model, optimizer)
    other, others = a_run(kind, groups=2, **options)
    step(other, others, 9)
    assert load_checkpoint(tmp_path, other, others) == begin
    for number in range(begin, begin + 3):
        step(model, optimizer, number)
        step(other, others, number)
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=10),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3, 5]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    ],
)
def test_the_schedule_is_kept(tmp_path, make):
    model, optimizer = a_run()
    rate = make(optimizer)
    for number in range(3):
        step(model, optimizer, number, rate)
    save_checkpoint(tmp_path, 3, model, optimizer, schedule=rate)
    other, others = a_run()
    again = make(others)
    assert load_checkpoint(tmp_path, other, others, schedule=again) == 3
    for number in range(3, 6):
        step(model, optimizer, number, rate)
        step(other, others, number, again)
        assert rate.get_last_lr() == again.get_last_lr()
    assert torch.equal(model[0].weight, other[0].weight)


def test_a_parameter_without_a_gradient_has_no_state(tmp_path):
    model, optimizer = a_run()
    model[1](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer)
    other, others = a_run()
    assert load_checkpoint(tmp_path, other, others) == 1
    assert len(others.state) == len(optimizer.state) == 2


def test_what_another_run_had_is_refused(tmp_path):
    model, optimizer = a_run()
    step(model, optimizer, 0)
    save_checkpoint(tmp_path, 1, model, optimizer, settings={"batch": 8, "text": "ab"})
    rate = torch.optim.lr_scheduler.ConstantLR(optimizer)
    same = {"batch": 8, "text": "ab"}
    other = nn.Sequential(nn.Linear(2, 3))
    for words, pair, options in (
        (
            "settings: batch: expected 8 as in .*, got 4",
            (),
            {"settings": same | {"batch": 4}},
        ),
        ("settings: batch: expected 8 .*, got None", (), {"settings": {"text": "ab"}}),
        ("settings: more: expected None .*, got 1", (), {"settings": same | {"more": 1}}),
        ("settings: batch: expected 8", (), {}),
        ("schedule: expected 'none' .*, got 'one'", (), {"schedule": rate}),
        ("optimizer: expected 'AdamW' .*, got 'SGD'", a_run(torch.optim.SGD), {}),
        ("optimizer: group 0: expected .*, got ", a_run(groups=2), {}),
        ("expected one made of the model's", (model, a_run()[1]), {}),
        (
            r"model: 1.weight: expected \(\(2, 3\), .*, got None",
            (other, torch.optim.AdamW(other.parameters())),
            {},
        ),
    ):
        options = {"settings": same} | options if pair or "schedule" in options else options
        before = [x.clone() for x in model.parameters()]
        with pytest.raises(ValueError, match=words):
            load_checkpoint(tmp_path, *(pair or (model, optimizer)), **options)
        assert all(map(torch.equal, before, model.parameters()))
    with_lists = torch.optim.LBFGS(model.parameters())
    with_lists.step(lambda: model(torch.ones(1, 2)).sum())
    with pytest.raises(TypeError, match=r"can't keep .*, a list"):
        save_checkpoint(tmp_path, 2, model, with_lists)
    with pytest.raises(TypeError, match="settings, schedule: can't be kept"):
        save_checkpoint(tmp_path, 2, model, optimizer, settings={"folder": tmp_path})
    assert [path.name for path in tmp_path.glob("*-*")] == ["step-00000001"]


def damage(folder, name):
    path = next(folder.glob(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorten(folder, name):
    path = next(folder.glob(name))
    path.write_bytes(path.read_bytes()[:-5])


def remove(folder, name):
    next(folder.glob(name)).unlink()


@pytest.mark.parametrize("harm", [damage, shorten, remove])
@pytest.mark.parametrize("name", ["*.distcp", ".metadata", "run.pt", SUMS])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_read(tmp_path, harm, name):
    if harm is remove and name == SUMS:
        return  # it is the last to be written: without it nothing was finished
    weights, (model, optimizer) = [], a_run()
    for number in (1, 2, 3):
        step(model, optimizer, number)
        save_checkpoint(tmp_path, number, model, optimizer)
        weights.append([x.detach().clone() for x in model.parameters()])
    harm(tmp_path / "step-00000003", name)
    model, optimizer = a_run()
    with pytest.warns(UserWarning, match=r"step-00000003 is damaged \(.*damaged-00000003"):
        assert load_checkpoint(tmp_path, model, optimizer) == 2
    assert all(map(torch.equal, weights[1], model.parameters()))
    step(model, optimizer, 3)
    save_checkpoint(tmp_path, 3, model, optimizer)
    assert all(map(torch.equal, weights[2], model.parameters()))
    assert finished(tmp_path) == [2, 3] and (tmp_path / "damaged-00000003").is_dir()


def two_ranks_load(rank, folder):
    torch.manual_seed(rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer = a_run()
        try:
            found = load_checkpoint(folder, model, optimizer)
        except ValueError as error:
            found = str(error)
    return found, model[0].weight.tolist(), sum("damaged" in str(x.message) for x in said)


def test_all_ranks_read_the_same_and_one_says_why(tmp_path):
    model, optimizer = a_run()
    for number in (1, 2):
        step(model, optimizer, number)
        save_checkpoint(tmp_path, number, model, optimizer)
    damage(tmp_path / "step-00000002", "*.distcp")
    (found, weights, said), (other, others, silent) = run(two_ranks_load, 2, tmp_path)
    assert found == other == 1 and weights == others and (said, silent) == (1, 0)
    damage(tmp_path / "step-00000001", "run.pt")
    for found, _, _ in run(two_ranks_load, 2, tmp_path):
        assert "every checkpoint" in found  # rather than to begin anew without a word


def a_rank_claims(rank, folder):
    claim_folder(folder, wait=0.2)


def test_a_folder_has_one_run_at_a_time(tmp_path):
    """Until its process ends, however that is."""
    code = f"from attnlib.parallel import claim_folder; claim_folder({str(tmp_path)!r}); "
    code += "print('has it', flush=True); import time; time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(ValueError, match=f"another run has {tmp_path}"):
            claim_folder(tmp_path, wait=0.2)
        with pytest.raises(RankError, match="another run has"):
            run(a_rank_claims, 2, tmp_path)
    finally:
        other.kill()
        other.wait()
    model, optimizer = a_run()
    save_checkpoint(tmp_path, 1, model, optimizer)
    save_checkpoint(tmp_path, 2, model, optimizer)
    assert finished(tmp_path) == [1, 2]


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(ValueError, match=r"can't write in .*file"):
            claim_folder(folder)
