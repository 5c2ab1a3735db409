"""A broker with logins, TLS and ACLs, and clients that it does not let in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tentalis.kafka.acls import ROLES
from tentalis.kafka.admin import bindings, ensure, grant
from tentalis.service.settings import Security, Settings
from tests.drill.fault import Sight, fault
from tests.drill.shell import Shell
from tests.support.security_lab import Authority, SafeBroker, environment

REFUSED = "no-access.md"
SECURITY = "security.md"
USER = "tentalis-worker"


class Logins:
    """A broker with a user of the role worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.safe = SafeBroker(folder)
        self.shell = Shell(folder, {"TENTALIS_HOME": str(folder / "home")})

    def open(self) -> None:
        self.safe.start()
        ensure(self.safe.super_user())
        self.safe.add_users([USER])
        grant(self.safe.super_user(), bindings([ROLES["worker"]], f"User:{USER}"))
        admin = environment(self.safe.super_user(), self.folder / "admin-password")
        self.shell.env["AS_ADMIN"] = " ".join(
            ["env", *(f"-u TENTALIS_SASL_{name}" for name in ("MECHANISM", "USERNAME", "PASSWORD_FILE"))]
            + [f"{name}={value}" for name, value in admin.items()]
        )

    def close(self) -> None:
        self.shell.close()
        self.safe.stop()

    def lost(self) -> list[str]:
        """Nothing is written here."""
        return []

    def use(self, settings: Settings) -> None:
        """Sets the variables for these settings, and forgets those before."""
        for name in [name for name in self.shell.env if name.startswith("TENTALIS_") and name != "TENTALIS_HOME"]:
            if name != "TENTALIS_CACHE":
                del self.shell.env[name]
        self.shell.env.update(environment(settings, self.folder / "password"))


@fault("logins", REFUSED, code=4, says="refuses the login of User:tentalis-worker")
def a_wrong_password(site: Logins) -> Iterator[Sight]:
    site.use(site.safe.login(USER, password="not-the-password"))
    sight = site.shell.run("tentalis topics list")
    assert "not-the-password" not in sight.says, "a message has the secret"
    site.use(site.safe.login(USER))
    yield sight


@fault("logins", REFUSED, code=4, says="requires a login on this port")
def no_login(site: Logins) -> Iterator[Sight]:
    site.use(site.safe.settings("OPEN", Security(protocol="PLAINTEXT")))
    sight = site.shell.run("tentalis topics list")
    site.use(site.safe.login(USER))
    yield sight


@fault("logins", REFUSED, code=4, says="speaks TLS on this port")
def no_tls(site: Logins) -> Iterator[Sight]:
    site.use(site.safe.settings("SASL", Security(protocol="PLAINTEXT")))
    sight = site.shell.run("tentalis topics list")
    site.use(site.safe.login(USER))
    yield sight


@fault("logins", REFUSED, code=4, says="is not trusted by TENTALIS_SSL_CA")
def an_untrusted_certificate(site: Logins) -> Iterator[Sight]:
    right = site.safe.login(USER)
    other = Authority(site.folder, "other").certificate
    site.use(right.model_copy(update={"security": right.security.model_copy(update={"ssl_ca": other})}))
    sight = site.shell.run("tentalis topics list")
    site.use(right)
    yield sight


@fault("logins", REFUSED, code=6, says="lacks ACLs that the role sessions needs")
def a_missing_acl(site: Logins) -> Iterator[Sight]:
    site.use(site.safe.login(USER))
    yield site.shell.run("tentalis serve sessions")


@fault("logins", SECURITY, code=6, says="the roles with this ACL are")
def the_work_of_another_role(site: Logins) -> Iterator[Sight]:
    """The user of a worker is to change topics."""
    site.use(site.safe.login(USER))
    yield site.shell.run("tentalis topics apply --yes")
