"""`docker/kubernetes`, rendered and held against the published schemas, compose.yaml, the images and the launcher."""

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import CHECKOUT
from schemas import PUBLISHED, check

from server.__main__ import _parse
from server.status import Status
from server.status_port import _choose
from server.tritonserver.process import EXIT_TIMEOUT_S

FOLDER = CHECKOUT / "docker" / "kubernetes"
BUILDER = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]

# The oldest that is still looked after somewhere, one in between, and the newest.
VERSIONS = ("1.30", "1.34", "1.37")
OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/tls", "kserve")
REPOSITORIES = ("bucket", "claim", "image")

pytestmark = [
    pytest.mark.skipif(not shutil.which(BUILDER[0]), reason="neither kubectl nor kustomize is installed"),
    pytest.mark.skipif(not PUBLISHED.is_dir(), reason="Kubernetes' schemas are not there; `make test` fetches them"),
]

Document = dict[str, Any]


def render(folder: Path) -> list[Document]:
    done = subprocess.run([*BUILDER, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Document]]:
    """Return what each overlay becomes, and the one for CPUs with each kind of repository."""
    found = {overlay: render(FOLDER / overlay) for overlay in OVERLAYS}
    copied = Path(shutil.copytree(CHECKOUT / "docker", tmp_path_factory.mktemp("kubernetes") / "docker"))
    overlay = copied / "kubernetes" / "overlays" / "cpu" / "kustomization.yaml"
    text = overlay.read_text()
    for kind in REPOSITORIES:
        overlay.write_text(text.replace("repository/claim", f"repository/{kind}"))
        found[kind] = render(overlay.parent)
    assert found["claim"] == found["overlays/cpu"]
    return found


@pytest.fixture(scope="module")
def compose() -> Document:
    return yaml.safe_load((CHECKOUT / "compose.yaml").read_text())["services"]


def find(documents: list[Document], kind: str, name: str = "modelyard") -> Document:
    (found,) = [item for item in documents if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def list_containers(documents: list[Document]) -> Iterator[Document]:
    """Yield every container of every pod, those that come first included."""
    for document in documents:
        spec = document.get("spec", {})
        pod = spec["template"]["spec"] if "template" in spec else spec
        if isinstance(pod, dict):
            yield from pod.get("initContainers", [])
            yield from pod.get("containers", [])


def find_server(documents: list[Document]) -> tuple[Document, Document]:
    """Return the pod that serves, and its container that does."""
    if any(item["kind"] == "ServingRuntime" for item in documents):
        pod = find(documents, "ServingRuntime")["spec"] | find(documents, "InferenceService")["spec"]["predictor"]
    else:
        pod = find(documents, "Deployment")["spec"]["template"]["spec"]
    (container,) = [item for item in pod["containers"] if item["name"] in ("server", "kserve-container")]
    return pod, container


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_as_the_published_schemas_want_it(rendered: dict[str, list[Document]], version: str) -> None:
    for name, documents in rendered.items():
        assert documents
        for document in documents:
            assert not check(document, version), (name, document["kind"])


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value"),
    [
        ("overlays/cpu", "Deployment", "spec/template/spec/containers/0/readinesProbe", {}),
        ("overlays/cpu", "Deployment", "spec/template/spec/terminationGracePeriodSeconds", "30 s"),
        ("overlays/cpu", "HorizontalPodAutoscaler", "spec/metrics/0/pods/target", {"averageValue": "20"}),
        ("overlays/cpu", "NetworkPolicy", "spec/policyType", ["Ingress"]),
        ("overlays/cpu", "ServiceMonitor", "spec/endpoints/0/interval", "5 seconds"),
        ("overlays/cpu", "ServiceMonitor", "spec/endpoints/0/ports", "metrics"),
        ("kserve", "ServingRuntime", "spec/containers", None),
        ("kserve", "ServingRuntime", "spec/containers/0/ports/0/containerPort", "8000"),
        ("kserve", "ServingRuntime", "spec/protocolVersion", ["v2"]),
        ("kserve", "InferenceService", "spec/predictor/model/storageURL", "pvc://models"),
        ("kserve", "InferenceService", "spec/predictor/minReplicas", "2"),
    ],
)
def test_what_the_schemas_do_not_allow_is_found(
    rendered: dict[str, list[Document]], overlay: str, kind: str, path: str, value: object
) -> None:
    document = copy.deepcopy(find(rendered[overlay], kind))
    *places, last = path.split("/")
    target: Any = document
    for place in places:
        target = target[int(place)] if isinstance(target, list) else target[place]
    if value is None:
        del target[last]
    else:
        target[last] = value
    assert check(document, VERSIONS[-1])


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_command_line_is_one_that_the_launcher_understands(
    rendered: dict[str, list[Document]], compose: Document, name: str
) -> None:
    _, container = find_server(rendered[name])
    assert "command" not in container, "the image's entry point is `modelyard serve`"
    arguments = _parse(container["args"])
    assert arguments.host == "0.0.0.0"
    ports = {arguments.http_port, arguments.grpc_port, arguments.metrics_port, arguments.status_port}
    said = {port["containerPort"] for port in container["ports"]}
    assert said == ({arguments.http_port} if name == "kserve" else ports)
    # What it writes lies where it may write, what it reads where the models are.
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert str(arguments.key_file.parent.parent) in mounts
    if name == "kserve":
        # Not mounted by us: KServe's storage initializer puts them there.
        assert str(arguments.repository) == "/mnt/models"
        assert not arguments.wait and arguments.follow == "off"
    else:
        assert container["args"] == compose["server"]["command"]
        (volume,) = compose["server"]["volumes"]
        _, target, mode = volume.rsplit(":", 2)
        assert mounts[target]["readOnly"] is (mode == "ro")
        dockerfile = (CHECKOUT / "docker" / "Dockerfile").read_text()
        # Installed, the repository is the folder of that name where it is started.
        assert target == f"{re.findall(r'^WORKDIR (.+)$', dockerfile, re.MULTILINE)[0]}/model_repository"
    assert set(mounts) <= {"/opt/modelyard/model_repository", "/tmp", "/dev/shm"}


def test_what_serves_has_what_compose_gives_it(rendered: dict[str, list[Document]], compose: Document) -> None:
    for name, service in (("overlays/cpu", "server"), ("overlays/gpu", "server-gpu"), ("kserve", "server")):
        pod, container = find_server(rendered[name])
        wanted = compose[service]
        assert container["image"] == wanted["image"]
        assert {item["name"]: item["value"] for item in container["env"]} == wanted["environment"]
        default = re.fullmatch(r"\$\{MODELYARD_MEMORY:-(\d+)g\}", wanted["mem_limit"])
        assert default and container["resources"]["limits"]["memory"] == f"{default[1]}Gi"
        assert "cpu" not in container["resources"]["limits"]
        sizes = {item["name"]: item["emptyDir"] for item in pod["volumes"] if "emptyDir" in item}
        assert sizes["shm"] == {
            "medium": "Memory",
            "sizeLimit": wanted["shm_size"].replace("m", "Mi").replace("g", "Gi"),
        }
        (tmpfs,) = wanted["tmpfs"]
        assert f"size={sizes['tmp']['sizeLimit'].removesuffix('i').lower()}," in tmpfs
        assert pod["shareProcessNamespace"] is wanted["init"]
    _, container = find_server(rendered["overlays/gpu"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_nothing_has_a_right_that_it_does_not_need(rendered: dict[str, list[Document]]) -> None:
    users = {
        user
        for path in (CHECKOUT / "docker").glob("Dockerfile*")
        for user in re.findall(r"^USER (.+)$", path.read_text(), re.M)
    }
    for name, documents in rendered.items():
        containers = list(list_containers(documents))
        assert containers
        for container in containers:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
            assert re.search(r":v?\d+\.\d+", container["image"])
        pod, container = find_server(documents)
        rights = pod["securityContext"] if name != "kserve" else container["securityContext"]
        assert rights["runAsNonRoot"] is True
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"{rights['runAsUser']}:{rights['runAsGroup']}" in users
        assert name == "kserve" or pod["automountServiceAccountToken"] is False


def ask_probe(probe: Document, container: Document, status: Status) -> int:
    """Return what the status port answers to a probe."""
    port = probe["httpGet"]["port"]
    named = {item["name"]: item["containerPort"] for item in container["ports"]}
    assert named.get(port, port) == _parse(container["args"]).status_port
    return _choose(status, "GET", probe["httpGet"]["path"])[0]


def test_a_server_that_starts_heals_or_drains_gets_no_requests_and_is_not_killed(
    rendered: dict[str, list[Document]],
) -> None:
    for documents in rendered.values():
        _, container = find_server(documents)
        readiness, liveness = container["readinessProbe"], container["livenessProbe"]
        status = Status()
        status.expect(["m"])
        assert ask_probe(readiness, container, status) == 503
        assert ask_probe(liveness, container, status) == ask_probe(container["startupProbe"], container, status) == 200
        status.count_models(1, 1)
        status.ready = True
        assert ask_probe(readiness, container, status) == 200
        status.ready = False
        assert ask_probe(readiness, container, status) == 503
        assert ask_probe(liveness, container, status) == 200
        assert readiness["failureThreshold"] == 1


def read_pause(container: Document) -> int:
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return int(seconds)


def test_there_is_time_to_be_taken_out_and_then_to_answer_what_is_in_flight(
    rendered: dict[str, list[Document]],
) -> None:
    for documents in rendered.values():
        pod, container = find_server(documents)
        # The launcher gives tritonserver a second more; whoever needs longer is killed with what it holds.
        assert pod["terminationGracePeriodSeconds"] > read_pause(container) + EXIT_TIMEOUT_S + 1
        for other in pod["containers"]:
            # A door closes before what lies behind it.
            assert other is container or read_pause(other) < read_pause(container)


def test_what_is_named_is_there(rendered: dict[str, list[Document]]) -> None:
    for name, documents in rendered.items():
        if name == "kserve":
            continue
        template = find(documents, "Deployment")["spec"]["template"]
        labels, pod = template["metadata"]["labels"], template["spec"]
        ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"] for container in list_containers(documents) for mount in container["volumeMounts"]}
        assert volumes == mounted
        made = {(item["kind"], item["metadata"]["name"]) for item in documents}
        for volume in pod["volumes"]:
            for source in (volume, *volume.get("projected", {}).get("sources", [])):
                if "configMap" in source:
                    assert ("ConfigMap", source["configMap"]["name"]) in made
                if "persistentVolumeClaim" in source:
                    assert ("PersistentVolumeClaim", source["persistentVolumeClaim"]["claimName"]) in made
        budget = find(documents, "PodDisruptionBudget")["spec"]
        policies = [item["spec"] for item in documents if item["kind"] == "NetworkPolicy"]
        services = [item for item in documents if item["kind"] == "Service"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        assert policies and all(item["podSelector"]["matchLabels"].items() <= labels.items() for item in policies)
        assert services and all(item["spec"]["selector"].items() <= labels.items() for item in services)
        used = {port["targetPort"] for service in services for port in service["spec"]["ports"]}
        used |= {port["port"] for rule in find(documents, "NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
        assert used <= ports
        reference = find(documents, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
        assert (reference["kind"], reference["name"]) in made
        monitor = find(documents, "ServiceMonitor")["spec"]
        (watched,) = [
            item
            for item in services
            if monitor["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
        ]
        assert {item["port"] for item in monitor["endpoints"]} == {"metrics", "status"}
        assert {item["port"] for item in monitor["endpoints"]} <= {port["name"] for port in watched["spec"]["ports"]}


def test_behind_tls_nobody_reaches_the_server_itself(rendered: dict[str, list[Document]], compose: Document) -> None:
    documents = rendered["overlays/tls"]
    pod, _ = find_server(documents)
    (tls,) = [item for item in pod["containers"] if item["name"] == "tls"]
    assert tls["command"] == compose["tls"]["command"]
    assert tls["image"] == compose["tls"]["image"]
    config = (CHECKOUT / "docker" / "tls" / "nginx.conf").read_text()
    (made,) = [item for item in documents if item["kind"] == "ConfigMap"]
    assert made["data"] == {"nginx.conf": config}
    assert {f"{port['containerPort']}" for port in tls["ports"]} == set(re.findall(r"listen (\d+) ssl", config))
    (alias,) = pod["hostAliases"]
    assert alias["ip"] == "127.0.0.1"
    assert set(re.findall(r"server (\w+):\d+;", config)) == set(alias["hostnames"])
    # Every file that it names is mounted beside it.
    (volume,) = [item["projected"] for item in pod["volumes"] if item["name"] == "tls"]
    paths = {item["path"] for source in volume["sources"] for item in source.get("secret", {}).get("items", [])}
    assert paths == set(re.findall(r"^ *(?:include|ssl_certificate|ssl_certificate_key) (.+);$", config, re.MULTILINE))
    offered = {port["name"] for port in find(documents, "Service")["spec"]["ports"]}
    open_to_all = {
        port["port"]
        for rule in find(documents, "NetworkPolicy")["spec"]["ingress"]
        if "from" not in rule
        for port in rule["ports"]
    }
    assert offered == open_to_all == {"https", "grpcs"}
    for service in (item for item in documents if item["kind"] == "Service"):
        assert not {"http", "grpc"} & {port["name"] for port in service["spec"]["ports"]}


def read_adapter() -> dict[str, str]:
    """Return what the adapter offers: name → query."""
    rules = yaml.safe_load((FOLDER / "monitoring" / "adapter.yaml").read_text())["rules"]["custom"]
    return {rule["name"]["as"]: rule["metricsQuery"] for rule in rules}


def test_the_autoscalers_ask_for_what_the_adapter_offers(rendered: dict[str, list[Document]]) -> None:
    offered, asked = read_adapter(), set()
    for documents in rendered.values():
        for document in documents:
            if document["kind"] == "HorizontalPodAutoscaler":
                metrics = document["spec"]["metrics"]
                asked |= {item["pods"]["metric"]["name"] for item in metrics if item["type"] == "Pods"}
    assert asked == set(offered)


@pytest.mark.skipif(not shutil.which("promtool"), reason="Prometheus is not installed; `apt-get install prometheus`")
def test_the_adapters_queries_tell_the_longest_queue_and_the_busiest_gpu(tmp_path: Path) -> None:
    rules = [
        {
            "record": name,
            "expr": query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="n",pod=~"a|b|c"'),
        }
        for name, query in read_adapter().items()
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "adapter", "rules": rules}]}))

    def tell(name: str, pod: str, model: str, step: float) -> dict[str, str]:
        labels = f'namespace="n",pod="{pod}",{model}'
        return {"series": f"{name}{{{labels}}}", "values": f"0+{step:g}x60"}

    # Pod a: a step whose 10 requests a second wait 30 ms each, and one whose do not wait. Pod b: idle.
    series = [
        tell("nv_inference_queue_duration_us", "a", 'model="slow"', 5 * 10 * 30_000),
        tell("nv_inference_request_success", "a", 'model="slow"', 5 * 10),
        tell("nv_inference_queue_duration_us", "a", 'model="fast"', 5 * 10 * 100),
        tell("nv_inference_request_success", "a", 'model="fast"', 5 * 10),
        tell("nv_inference_queue_duration_us", "b", 'model="slow"', 0),
        tell("nv_inference_request_success", "b", 'model="slow"', 0),
        {"series": 'nv_gpu_utilization{namespace="n",pod="a",gpu_uuid="0"}', "values": "0.2x60"},
        {"series": 'nv_gpu_utilization{namespace="n",pod="a",gpu_uuid="1"}', "values": "0.9x60"},
    ]
    expected = [
        ("modelyard_queue_milliseconds", {"a": 30, "b": 0}),
        ("modelyard_gpu_utilization", {"a": 0.9}),
    ]
    tests = [
        {
            "expr": name,
            "eval_time": "4m",
            "exp_samples": [{"labels": f'{name}{{pod="{pod}"}}', "value": value} for pod, value in values.items()],
        }
        for name, values in expected
    ]
    test = {"interval": "5s", "input_series": series, "promql_expr_test": tests}
    written = {"rule_files": ["rules.yml"], "evaluation_interval": "5s", "tests": [test]}
    (tmp_path / "test.yml").write_text(json.dumps(written))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_copied_repository_is_served_only_if_it_is_what_was_published(
    rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    (verify,) = [item for item in list_containers(rendered["bucket"]) if item["name"] == "verify"]
    (data,) = [item["data"] for item in rendered["bucket"] if item["kind"] == "ConfigMap"]
    (tmp_path / "verify.sh").write_text(data["verify.sh"])
    shell, _, folder = verify["command"]
    assert folder in {mount["mountPath"] for mount in find_server(rendered["bucket"])[1]["volumeMounts"]}

    def run_it() -> "subprocess.CompletedProcess[str]":
        words = [shell, str(tmp_path / "verify.sh"), str(tmp_path / "models")]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    assert run_it().returncode == 1
    assert "no published version" in run_it().stderr
    for version in ("1", "2"):
        for part in ("m", "m_model"):
            (tmp_path / "models" / part / version).mkdir(parents=True)
        (tmp_path / "models" / "m_model" / version / "model.onnx").write_text(version)
        sums = subprocess.run(
            ["sha256sum", f"../../m_model/{version}/model.onnx"],
            cwd=tmp_path / "models" / "m" / version,
            capture_output=True,
            text=True,
            check=True,
        )
        (tmp_path / "models" / "m" / version / "SHA256SUMS").write_text(sums.stdout)
    done = run_it()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 versions are as they were published\n"
    (tmp_path / "models" / "m_model" / "2" / "model.onnx").write_text("half")
    done = run_it()
    assert done.returncode == 1
    assert "models/m/2 is not what was published" in done.stderr
    (tmp_path / "models" / "m_model" / "2" / "model.onnx").unlink()
    assert run_it().returncode == 1


def test_every_file_is_used() -> None:
    for path in FOLDER.rglob("*"):
        if path.is_file() and path.name not in ("kustomization.yaml", "adapter.yaml"):
            assert path.name in (path.parent / "kustomization.yaml").read_text(), path
