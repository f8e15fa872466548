"""The values that `rlhf profile` prints are taken by the chart and by the operator, and each fits its platform."""

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_kubectl.submit_commands import declare
from rlhf_operator.placement.node_groups import with_coming_nodes
from rlhf_operator.settings import Settings
from rlhf_planning.command_line import Program
from rlhf_trainer.commands.ending import ending
from tests.each import each_case
from tests.helm.rendering import Helm, the

PLATFORMS = ("aks", "eks", "gke", "kind", "openshift")


def printed(platform: str) -> tuple[int, str, str]:
    program = Program("rlhf", "", lambda work, debug: ending(work, debug=debug)[0])
    declare(program)
    done = CliRunner().invoke(program.app, ["profile", platform])
    return done.exit_code, done.stdout, done.stderr


@each_case("platform", PLATFORMS)
def test_a_profile_is_valid(helm: Helm, platform: str) -> None:
    code, text, _ = printed(platform)
    values = yaml.safe_load(text)
    assert code == 0
    assert "# Source: https://" in text
    helm.lint(values)
    config = the(helm.template(values), "ConfigMap")["data"]["config.yaml"]
    settings = Settings.model_validate(yaml.safe_load(config), by_alias=True, by_name=False)
    assert settings.storage.access_mode == ("ReadWriteOnce" if platform == "kind" else "ReadWriteMany")
    tolerates = "nvidia.com/gpu" in yaml.safe_dump(settings.worker.template)
    assert tolerates == (platform != "kind")


@each_case("platform", [each for each in PLATFORMS if each != "kind"])
def test_its_example_of_a_node_group_is_right(platform: str) -> None:
    text = printed(platform)[1].partition("# cluster:")[2].partition("\n# Source:")[0]
    example = yaml.safe_load(f"cluster:{text}".replace("\n# ", "\n"))
    settings = Settings.model_validate(example["cluster"], by_alias=True, by_name=False)
    (group,) = settings.node_groups
    assert settings.gpu_of(group.gpu or "")
    assert len(with_coming_nodes((), settings)) == group.most > 0


def test_openshift_chooses_the_operators_user(helm: Helm) -> None:
    values = yaml.safe_load(printed("openshift")[1])
    pod = the(helm.template(values), "Deployment")["spec"]["template"]["spec"]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()


@pytest.mark.parametrize(("platform", "dns"), [("openshift", "daemonset-dns"), ("gke", "169.254.20.10/32")])
def test_sandboxes_find_the_dns_of_the_platform(platform: str, dns: str) -> None:
    assert dns in str(yaml.safe_load(printed(platform)[1])["sandboxes"]["dns"])


def test_another_platform_is_one_sentence() -> None:
    assert printed("gek") == (2, "", "error: PLATFORM: is gek; did you mean gke?\n")
