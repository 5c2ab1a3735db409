"""Attacks on networks: loopback, metadata addresses, the hypervisor, listeners and Unix sockets."""

from functools import partial

from tests.redteam.attack import Attack

_network = partial(Attack, "network", success="it reaches a network, or a network reaches it")
_unix = partial(Attack, "Unix sockets", success="it reaches a server on a Unix socket")

NETWORK = (
    _network("loopback", code="import socket; socket.create_connection(('127.0.0.1', @PORT@), 2); print('won')"),
    _network(
        "loopback by IPv6",
        code="import socket; socket.create_connection(('::ffff:127.0.0.1', @PORT@), 2); print('won')",
    ),
    _network(
        "loopback without waiting",
        code="""import errno, socket, time
s = socket.socket(); s.setblocking(False)
if s.connect_ex(('127.0.0.1', @PORT@)) in (0, errno.EINPROGRESS):
    time.sleep(0.2); s.getpeername(); print('won')""",
    ),
    _network(
        "metadata address", code="import socket; socket.create_connection(('169.254.169.254', 80), 2); print('won')"
    ),
    _network(
        "datagram",
        code="import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', @PORT@))",
        outside=lambda trial: trial.place.received(),
    ),
    _network(
        "name server",
        code="import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('192.0.2.1', 53)); print('won')",
    ),
    _network("raw socket", code="import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('won')"),
    _network("packets", code="import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); print('won')"),
    _network(
        "ping",
        code="import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1); s.sendto(bytes(16), ('127.0.0.1', 0)); print('won')",
    ),
    _network("sockets of the hypervisor", code="import socket; socket.socket(40, socket.SOCK_STREAM); print('won')"),
    _network(
        "listener",
        code="""import socket
s = socket.socket(); s.bind(('127.0.0.1', @ATTACKERS_PORT@)); s.listen(); s.settimeout(2); s.accept()""",
        outside=lambda trial: trial.place.listened.wait(0.5),
    ),
    _network(
        "listener on every address",
        code="""import socket
s = socket.socket(socket.AF_INET6); s.setsockopt(41, 26, 0)
s.bind(('::', @ATTACKERS_PORT@)); s.listen(); s.settimeout(2); s.accept()""",
        outside=lambda trial: trial.place.listened.wait(0.5),
    ),
    _unix(
        "by its path",
        code="import socket; s = socket.socket(socket.AF_UNIX); s.connect('@PLACE@/socket'); print('won')",
    ),
    _unix(
        "through a link",
        code="import os, socket; os.symlink('@PLACE@/socket', 's'); s = socket.socket(socket.AF_UNIX); s.connect('s'); print('won')",
    ),
    _unix(
        "abstract",
        code="import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0tentalis-test-@VICTIM@'); print('won')",
    ),
    _unix(
        "of the container engine",
        code="import socket; s = socket.socket(socket.AF_UNIX); s.connect('/var/run/docker.sock'); print('won')",
    ),
    _unix(
        "datagram",
        code="import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.sendto(b'x', '/run/systemd/journal/socket'); print('won')",
    ),
)
