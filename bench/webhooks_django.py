"""The peer that persists: django-outbound-webhooks, one process that fires and then delivers. Prints deliveries/s.

Called by bench/webhooks.py: URL of the receiver, number of events, database file. Each event is fired in a
transaction of its own, as a web request would; then its relay runs until nothing is owed.
"""

import base64
import secrets
import sys
import tempfile
import time
from pathlib import Path

EVENTS = """
from dataclasses import dataclass
from django_domain_events import event

@event
@dataclass(frozen=True, slots=True)
class OrderPlaced:
    text: str
"""


def main(url: str, count: int, database: str) -> None:
    import django
    from django.conf import settings

    settings.configure(
        SECRET_KEY="bench",
        USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django_domain_events",
            "django_outbound_webhooks",
            "benchshop",
        ],
        DJANGO_OUTBOUND_WEBHOOKS={"ALLOW_PRIVATE_ADDRESSES": True},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()
    from benchshop.events import OrderPlaced
    from django.core.management import call_command
    from django.db import connection, transaction
    from django_domain_events import fire
    from django_domain_events.models.delivery_record import DeliveryRecord
    from django_outbound_webhooks import register_endpoint

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        # The same promise as ours: write-ahead log, synced at every commit.
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    register_endpoint(name="bench", url=url, secret=secret, event_names=["benchshop.OrderPlaced"])
    began = time.perf_counter()
    for _ in range(count):
        with transaction.atomic():
            fire(OrderPlaced(text="x" * 489))
    deadline = time.monotonic() + 100
    while DeliveryRecord.objects.filter(succeeded_at=None).exists() and time.monotonic() < deadline:
        call_command("deliver_events", once=True, verbosity=0)
    print(count / (time.perf_counter() - began))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        package = Path(place) / "benchshop"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "events.py").write_text(EVENTS)
        sys.path.insert(0, place)
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
