"""`vox serve --emit`: files for Ray Serve and Kubernetes, held against the validators of both."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from vox_core.errors import ConfigError
from vox_serve import deploy

KEY = "correct horse battery"


def emitted(vox, *arguments: Any) -> list[Any]:
    done = vox("serve", *arguments)
    assert done.code == 0, done.err
    assert KEY not in done.out
    assert "&id" not in done.out, "an alias is hard to edit"
    return [*yaml.safe_load_all(done.out)]


@pytest.fixture
def kubernetes(vox, folders) -> list[Any]:
    flags = ("--image", "r/vox:1", "--dtype", "fp32", "--drain", "1m", "--api-key", KEY)
    return emitted(vox, folders / "one", "--name", "b=base-id", "--emit", "kubernetes", *flags)


@pytest.fixture
def resolving(monkeypatch, folders) -> None:
    """`base-id` is the id of the base."""
    real = deploy.select
    monkeypatch.setattr(
        deploy, "select", lambda names, given, **rest: _with_id(real(names, [], **rest))
    )


def _with_id(chosen: Any) -> Any:
    chosen.references["b"] = "base-id"
    chosen.models["b"] = chosen.models["base"]
    return chosen


@pytest.mark.usefixtures("resolving")
class TestKubernetes:
    def test_the_container_serves_the_runs_of_the_volume_under_their_names(self, kubernetes):
        deployment, service = kubernetes
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "r/vox:1"
        command = container["command"]
        assert command[:6] == ["vox", "serve", "--host", "0.0.0.0", "--port", "8000"]
        assert command[-4:] == ["--name", "one=/runs/one", "--name", "b=base-id"]
        assert command[command.index("--dtype") + 1] == "fp32"
        assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 70
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert (
            service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
        )

    def test_its_own_schema_accepts_it(self, kubernetes) -> None:
        validator = pytest.importorskip("kubernetes_validate")
        version = validator.latest_version()
        assert [each["kind"] for each in kubernetes] == ["Deployment", "Service"]
        for each in kubernetes:
            validator.validate(each, version, strict=True)
            with pytest.raises(validator.ValidationError):
                validator.validate({**each, "spec": {"wrong": 1}}, version, strict=True)

    def test_the_command_is_one_that_vox_takes(self, vox, kubernetes) -> None:
        (container,) = kubernetes[0]["spec"]["template"]["spec"]["containers"]
        done = vox(*container["command"][1:])
        assert (done.code, "error[VOX-C004]" in done.err) == (2, True), "a key, which a secret has"
        assert "without a key" in done.err

    @pytest.mark.parametrize("flag", ["--allow-adapters", "--engine-python"])
    def test_paths_of_this_machine_are_refused(self, vox, folders, flag) -> None:
        flags = ("--emit", "kubernetes", "--image", "r/vox:1")
        done = vox("serve", folders / "one", *flags, flag, folders)
        assert (done.code, done.out) == (2, "")
        assert f"{flag}" in done.err
        assert "the volume of runs is /runs" in done.err

    def test_an_image_is_needed(self, vox, folders) -> None:
        done = vox("serve", folders / "one", "--emit", "kubernetes")
        assert (done.code, "--image" in done.err) == (2, True)


class TestRay:
    def test_the_application_loads_the_models_that_were_named(self, vox, folders) -> None:
        (found,) = emitted(
            vox, folders / "one", "--emit", "ray", "--port", 1234, "--queue", 5, "--max-batch", 3
        )
        assert found["http_options"] == {"host": "127.0.0.1", "port": 1234}
        (application,) = found["applications"]
        assert application["import_path"] == "vox_serve.deploy:application"
        args = application["args"]
        assert args == {
            "models": {"one": str(folders / "one")},
            "settings": {"queue": 5, "max_batch": 3},
            "key": False,
        }
        assert application["deployments"][0]["max_ongoing_requests"] == 8

    def test_its_own_schema_accepts_it(self, vox, folders) -> None:
        schema = pytest.importorskip("ray.serve.schema")
        (found,) = emitted(vox, folders / "one", "--emit", "ray")
        (read,) = schema.ServeDeploySchema.model_validate(found).applications
        (deployment,) = read.deployments
        assert (read.name, deployment.name, deployment.num_replicas) == ("vox", "Vox", 1)

    def test_paths_are_those_of_this_machine(self, vox, folders, monkeypatch) -> None:
        monkeypatch.chdir(folders.parent)
        flags = ("--emit", "ray", "--allow-adapters", folders.name)
        (found,) = emitted(vox, folders / "one", *flags)
        (application,) = found["applications"]
        assert application["args"]["settings"] == {"allow_adapters": str(folders)}
        done = vox("serve", folders / "one", "--emit", "ray", "--allow-adapters", folders / "gone")
        assert (done.code, "--allow-adapters" in done.err) == (2, True)

    def test_a_replica_serves_the_models(self, folders) -> None:
        from starlette.testclient import TestClient

        settings = {"backend": "cpu", "dtype": "fp32"}
        args = {"models": {"mine": str(folders / "one")}, "settings": settings, "key": False}
        app = deploy._opener(args)()
        with app.state.opened, TestClient(app, "http://127.0.0.1") as client:
            names = [each["id"] for each in client.get("/v1/models").json()["data"]]
            assert names == ["mine", "base"]

    def test_a_replica_needs_the_key_that_the_file_was_made_with(self, folders) -> None:
        with pytest.raises(ConfigError, match="VOX_API_KEY"):
            deploy._opener({"models": {}, "settings": {}, "key": True})()

    def test_another_address_needs_a_key(self, vox, folders) -> None:
        done = vox("serve", folders / "one", "--emit", "ray", "--host", "0.0.0.0")
        assert (done.code, "VOX_API_KEY" in done.err) == (2, True)
        flags = ("--emit", "ray", "--host", "0.0.0.0", "--api-key", KEY)
        assert emitted(vox, folders / "one", *flags)[0]["applications"][0]["args"]["key"] is True
