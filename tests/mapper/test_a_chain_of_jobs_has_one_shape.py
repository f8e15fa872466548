"""The shape of a model is that of the model from which a chain of jobs makes it."""

from rlhf_api.job import Job
from rlhf_mapper.config_file import made_from
from tests.api.cases import made


def job(base: str, name: str, *overrides: str) -> Job:
    return Job.parse(made(base, (f"metadata.name={name}", *overrides)))


def test_the_first_of_a_chain_has_the_shape() -> None:
    jobs = {"one": job("SFT", "one"), "two": job("RewardModel", "two", "models.reward.uri=job://one")}
    last = job("PPO", "last", "models.reward.uri=job://two", "models.critic.uri=job://two")
    assert made_from(last, "critic", jobs) == (jobs["one"], "actor")
    assert made_from(last, "actor", jobs) == (last, "actor")
    assert made_from(last, "reward", {"two": jobs["two"]}) == (jobs["two"], "reward")


def test_jobs_that_name_each_other_end_the_search() -> None:
    """One has succeeded long ago; the other was made anew and reads it."""
    jobs = {name: job("SFT", name, f"models.actor.uri=job://{maker}") for name, maker in (("a", "b"), ("b", "a"))}
    for each in (jobs["a"], job("SFT", "c", "models.actor.uri=job://a")):
        assert made_from(each, "actor", jobs)[0] in jobs.values()
    alone = job("SFT", "a", "models.actor.uri=job://a")
    assert made_from(alone, "actor", {"a": alone}) == (alone, "actor")
