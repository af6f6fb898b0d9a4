/** Addresses of a service, as the Python clients take them too. */

/** What gRPC knows beside HOST:PORT: sockets of the host, and names with a resolver. */
const OTHER_NAMES = /^(unix:|(dns|ipv4|ipv6):\/\/)/;

/** A name or an IPv4 address, an IPv6 one, or what says which of them it is; and a port. */
const HOST_AND_PORT = /^(?:[^:/]+|\[[^[\]]+\]|(?:dns|ipv4|ipv6):.+):(\d+)$/;

/**
 * Throws RangeError where the text is not HOST:PORT, with an IPv6 address in brackets, nor another name of gRPC's.
 * Without a port, or brackets, gRPC takes all of it for the host, and goes to port 443.
 */
export function checkAddress(text: string): void {
  if (OTHER_NAMES.test(text)) {
    return;
  }
  const port = Number(HOST_AND_PORT.exec(text)?.[1] ?? 0);
  if (port < 1 || port > 65535) {
    throw new RangeError(`${JSON.stringify(text)} must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051`);
  }
}
