"""webhooks: run it with `python main.py`; see docs/webhooks.md."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from brokerless.webhooks import AddressPolicy, BlockingDispatcher, DispatcherConfig, verify


class TheirServer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        verify(self.headers.items(), body, [secret])  # raises unless it is ours
        print(body)  # prints b'{"order": 17}'
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args): ...


server = HTTPServer(("127.0.0.1", 0), TheirServer)
receiver = Thread(target=server.handle_request, daemon=True)
receiver.start()
config = DispatcherConfig(  # private addresses are refused unless you open them
    policy=AddressPolicy(allow=("127.0.0.0/8",), schemes=("http",)), verification="none"
)
with BlockingDispatcher("var/outbox.sqlite", source="shop", config=config) as dispatcher:
    url = f"http://127.0.0.1:{server.server_port}/"
    _, secret = dispatcher.add_endpoint(url, ["order.*"])
    dispatcher.publish("order.paid", b'{"order": 17}')  # on disk when it returns; delivered until it is taken
    receiver.join(10)
