"""Keys, certificates, tokens and kubeconfigs of a test cluster."""

import base64
import json
from pathlib import Path

from tests.cluster.processes import output_of
from tests.cluster.settings import API_SERVICE_IP, NODE_IP, USERS, Settings

DAYS = 30
SERVER_NAMES = [
    "DNS:kubernetes",
    "DNS:kubernetes.default",
    "DNS:kubernetes.default.svc",
    "DNS:localhost",
    "IP:127.0.0.1",
    f"IP:{API_SERVICE_IP}",
    f"IP:{NODE_IP}",
]


def write_credentials(settings: Settings) -> None:
    """FOLDER/pki, FOLDER/tokens.csv and FOLDER/USER.kubeconfig for every user."""
    folder = Path(settings.folder)
    _certificates(folder / "pki")
    rows = [f'{settings.tokens[name]},{user},{name},"{groups}"\n' for name, (user, groups) in USERS.items()]
    (folder / "tokens.csv").write_text("".join(rows))
    authority = (folder / "pki/ca.crt").read_bytes()
    for name in USERS:
        text = kubeconfig(settings.url, settings.tokens[name], authority)
        (folder / f"{name}.kubeconfig").write_text(text)


def kubeconfig(server: str, token: str, authority: bytes | None = None) -> str:
    """The text of a kubeconfig: an API server's URL, for whom a token stands, and the CA's certificate for https."""
    cluster = {"server": server}
    if authority is not None:
        cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
    }
    return json.dumps(document)


def _certificates(pki: Path) -> None:
    """A CA, the server's certificate, its client certificate for kubelets, and the key of service accounts."""
    pki.mkdir()
    make_authority(pki)
    sign(pki, "apiserver", "/CN=kube-apiserver", "subjectAltName=" + ",".join(SERVER_NAMES))
    sign(pki, "kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", "extendedKeyUsage=clientAuth")
    _key(pki / "sa.key")


def make_authority(pki: Path) -> None:
    """ca.key and ca.crt."""
    _key(pki / "ca.key")
    output_of(
        "openssl", "req", "-x509", "-new", "-key", pki / "ca.key", "-subj", "/CN=test-ca", "-days", DAYS,
        "-out", pki / "ca.crt",
    )  # fmt: skip


def sign(pki: Path, name: str, subject: str, extension: str) -> None:
    """NAME.key and NAME.crt, by the authority of the folder."""
    _key(pki / f"{name}.key")
    request, extensions = pki / f"{name}.csr", pki / f"{name}.ext"
    output_of("openssl", "req", "-new", "-key", pki / f"{name}.key", "-subj", subject, "-out", request)
    extensions.write_text(extension)
    authority = ["-CA", pki / "ca.crt", "-CAkey", pki / "ca.key", "-CAcreateserial", "-days", DAYS]
    output_of(
        "openssl", "x509", "-req", "-in", request, *authority, "-extfile", extensions, "-out", pki / f"{name}.crt"
    )


def _key(path: Path) -> None:
    output_of("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
