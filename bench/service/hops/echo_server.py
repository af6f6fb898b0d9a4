"""A bare Python gRPC echo: the least that a call with these bytes can cost. Prints its port.

python -m bench.service.hops.echo_server [CERTIFICATE KEY]

With the files of a certificate and its key it speaks TLS.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from moeserve.proto.heap import keep_freed_memory

METHOD = "/bench.Echo/Echo"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Echo(grpc.GenericRpcHandler):
    """Answers every call with its own bytes: no message is parsed, nothing is copied by hand."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Returns one handler for every method."""
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


def main() -> None:
    """Serves on a free port of loopback until stdin ends."""
    keep_freed_memory()
    server = grpc.server(ThreadPoolExecutor(4), handlers=(Echo(),), options=OPTIONS)
    if len(sys.argv) > 1:
        certificate, key = (Path(name).read_bytes() for name in sys.argv[1:])
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(0)


if __name__ == "__main__":
    main()
