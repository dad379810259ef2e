"""Commands that share a study: each trial has one owner, and is taken over only from an owner that is gone."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.config.schemas.sweeper import Wait
from foundry.run_dir.study_storage import open_storage

optuna = pytest.importorskip("optuna", reason="needs the extra search")
from foundry.sweeps.search.commands import Commands  # noqa: E402 - which imports it
from foundry.sweeps.search.proposals import Proposer  # noqa: E402
from foundry.sweeps.search.study import SearchStudy  # noqa: E402


@pytest.fixture(params=["journal", "sqlite"])
def location(request, tmp_path):
    return {"journal": str(tmp_path / "study.jsonl"), "sqlite": f"sqlite:///{tmp_path}/study.db"}[request.param]


def join(storage, me, **options):
    """Return the study as a command sees it."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    facts = {"direction": "minimize"}
    return SearchStudy.create(storage, "s", "minimize", facts, Wait.none, Commands(storage, "s", me, **options))


def test_one_of_several_simultaneous_claims_takes_over_a_trial(location):
    number = join(open_storage(location), "gone").add_trial()
    studies = [join(open_storage(location), f"command {index}") for index in range(6)]
    start, winners = threading.Barrier(6), []

    def claim(study):
        trial = study.trials()[number]
        start.wait()
        if study.commands.claim(trial, "gone"):
            winners.append(study.commands.me)

    threads = [threading.Thread(target=claim, args=(study,)) for study in studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = winners
    assert {study.commands.owners(study.trials())[number] for study in studies} == {winner}


def test_claim_against_a_former_owner_has_no_effect(monkeypatch):
    """Command b reads the owner, and command c claims the trial before b does."""
    storage = optuna.storages.InMemoryStorage()
    a, b, c = (join(storage, name) for name in "abc")
    a.add_trial()
    (trial,) = a.trials()
    create = storage.create_new_trial

    def create_later(*arguments):
        monkeypatch.setattr(storage, "create_new_trial", create)
        assert c.commands.claim(trial, "a")
        return create(*arguments)

    monkeypatch.setattr(storage, "create_new_trial", create_later)
    assert not b.commands.claim(trial, "a")
    assert b.commands.owners([trial]) == {0: "c"}
    assert b.commands.claim(trial, "c")
    assert c.commands.owners([trial]) == {0: "b"}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["beat", "look", "outage"]), st.integers(0, 40)), max_size=30
    )
)
def test_owner_is_gone_only_after_silence_without_an_outage(steps):
    """Compare with the definition, for any order of heartbeats, looks and outages of three commands."""
    storage, now = optuna.storages.InMemoryStorage(), [0.0]
    commands = {name: join(storage, name, takeover_seconds=60).commands for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundry.sweeps.search.commands.time.monotonic", lambda: now[0])
        for name in "abc":
            commands[name]._beat()
        beats, first_seen, outages = dict.fromkeys("abc", 0), {}, dict.fromkeys("abc", -1.0)
        for me, action, seconds in steps:
            now[0] += seconds
            if action == "beat":
                commands[me]._beat()
                beats[me] += 1
            elif action == "outage":
                commands[me].note_outage()
                outages[me] = now[0]
            else:
                expected = set()
                for other in set("abc") - {me}:
                    since = first_seen.setdefault((me, other, beats[other]), now[0])
                    if now[0] - max(since, outages[me]) >= 60:
                        expected.add(other)
                assert commands[me].gone("abc") == expected


def test_owner_is_not_gone_if_only_the_request_took_long(monkeypatch):
    storage, now = optuna.storages.InMemoryStorage(), [0.0]
    a, b = (join(storage, name, takeover_seconds=60).commands for name in "ab")
    monkeypatch.setattr("foundry.sweeps.search.commands.time.monotonic", lambda: now[0])
    read = storage.get_study_user_attrs

    def read_slowly(study_id):
        attributes = read(study_id)
        now[0] += 100
        return attributes

    b._beat()
    monkeypatch.setattr(storage, "get_study_user_attrs", read_slowly)
    assert a.gone("b") == set()
    b._beat()
    assert a.gone("b") == set()
    assert a.gone("b") == set()
    now[0] += 60
    assert a.gone("b") == {"b"}


def test_late_heartbeat_of_a_command_restarts_the_measurement_of_others(monkeypatch):
    storage, now = optuna.storages.InMemoryStorage(), [0.0]
    a, b = (join(storage, name, takeover_seconds=60).commands for name in "ab")
    monkeypatch.setattr("foundry.sweeps.search.commands.time.monotonic", lambda: now[0])
    b._beat()
    assert a.gone("b") == set()
    write = storage.set_study_user_attr

    def write_slowly(*arguments):
        write(*arguments)
        now[0] += 100

    monkeypatch.setattr(storage, "set_study_user_attr", write_slowly)
    a._beat()
    assert a.gone("b") == set()
    now[0] += 60
    assert a.gone("b") == {"b"}


def test_two_processes_with_the_id_of_one_command_warn_once(capsys):
    storage = optuna.storages.InMemoryStorage()
    first, second = (join(storage, "a").commands for _ in range(2))
    first._beat()
    first._check_alone()
    second._check_alone()  # its first heartbeat may have failed
    second._beat()
    second._check_alone()
    assert capsys.readouterr().err == ""
    first._check_alone()
    first._beat()
    first._check_alone()
    second._check_alone()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["another process continues the same sweep directory"] * 2


def test_heartbeats_continue_after_an_outage(monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    commands = join(storage, "a", takeover_seconds=0.06).commands
    other, failed = join(storage, "b").commands, threading.Event()
    write = storage.set_study_user_attr

    def fail(*arguments):
        failed.set()
        raise OSError("no route to host")

    def heartbeat():
        return storage.get_study_user_attrs(other._id)["a"]

    with commands.beating():
        monkeypatch.setattr(storage, "set_study_user_attr", fail)
        assert failed.wait(60)
        monkeypatch.setattr(storage, "set_study_user_attr", write)
        last = heartbeat()
        while heartbeat() == last:
            assert other.gone(["a"]) == set()


def test_study_waits_until_a_storage_responds_again(capsys, monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    study = join(storage, "a")
    create, outages = storage.create_new_trial, iter(range(3))

    def create_later(*arguments):
        if next(outages, None) is not None:
            raise OSError("no route to host")
        return create(*arguments)

    monkeypatch.setattr("foundry.sweeps.search.study.time.sleep", lambda seconds: None)
    monkeypatch.setattr(storage, "create_new_trial", create_later)
    assert study.add_trial() == 0
    lines = ["the storage of the search does not respond, the search waits: no route to host"]
    assert capsys.readouterr().err.splitlines() == [*lines, "the storage of the search responds again"]


def test_result_of_a_trial_that_was_taken_over_is_dropped():
    storage = optuna.storages.InMemoryStorage()
    slow, taker = join(storage, "slow"), join(storage, "taker", takeover_seconds=0.0)
    number = slow.add_trial()
    assert taker.interrupted((), 1, 5) == []  # the first look at the heartbeat
    assert taker.awaits_others(5)
    assert taker.interrupted((), 1, 5) == [number]
    assert not slow.tell(number, 1.0)
    assert slow.interrupted((), 1, 5) == []
    assert taker.tell(number, 2.0)
    assert [trial.value for trial in slow.trials()] == [2.0]
    assert not taker.awaits_others(5)


def test_command_that_lost_a_trial_records_nothing_in_it():
    """The command is suspended during its proposal, and another one proposes the values and runs the trial."""
    storage = optuna.storages.InMemoryStorage()
    slow, taker = join(storage, "slow"), join(storage, "taker")
    number = slow.add_trial()
    distributions = {"key": optuna.distributions.FloatDistribution(0.0, 1.0)}
    proposer = Proposer({"_target_": "optuna.samplers.RandomSampler"}, "minimize", distributions)

    class SlowProposer(Proposer):
        def replay(self, number, trials):
            proposal = super().replay(number, trials)
            assert taker.commands.claim(taker.trials()[number], "slow")
            assert taker.complete(number, proposer)
            return proposal

    assert not slow.complete(number, SlowProposer(proposer._sampler, "minimize", distributions))
    (trial,) = taker.trials()
    assert taker.complete(number, proposer)
    assert not slow.complete(number, proposer)
    slow.note_stop(number)
    assert [after.params for after in slow.trials()] == [trial.params] != [{}]
    assert slow.awaits_others(1)


def test_study_that_another_command_creates_meanwhile_is_not_an_old_one(monkeypatch):
    storage = optuna.storages.InMemoryStorage()
    read = SearchStudy.trials

    def read_later(study):
        monkeypatch.setattr(SearchStudy, "trials", read)
        join(storage, "b").add_trial()
        return read(study)

    monkeypatch.setattr(SearchStudy, "trials", read_later)
    assert join(storage, "a").wait is Wait.none


def test_trial_beyond_n_trials_runs_only_if_the_search_is_extended():
    """Two commands that see the same number of trials add one each."""
    storage = optuna.storages.InMemoryStorage()
    study = join(storage, "a")
    numbers = [study.add_trial() for _ in range(3)]
    assert study.interrupted((), 9, 2) == numbers[:2]
    assert study.interrupted((), 9, 3) == numbers
    assert not join(storage, "b").awaits_others(0)
