from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from brokerless.core import DiskJournal
from brokerless.direct import Publisher

ADDRESS = "ipc://var/shop.sock"  # or tcp://127.0.0.1:5555, for consumers on other machines


@asynccontextmanager
async def lifespan(app):
    with Publisher(ADDRESS, source="shop", journal=DiskJournal("var/shop")) as app.state.events:
        yield


async def order(request):
    body = await request.body()
    receipt = request.app.state.events.publish("orders.new", body, content_type="application/json")
    return JSONResponse({"order": receipt.offset}, status_code=202)


app = Starlette(routes=[Route("/orders", order, methods=["POST"])], lifespan=lifespan)
