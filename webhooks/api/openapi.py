"""OpenAPI 3.1 of the registration endpoint, made from the Structs that validate it."""

from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from brokerless.webhooks.api import schemas as schema
from brokerless.webhooks.rules import DeliveryId, EndpointId, EventId, IdempotencyKey, Topic

_JSON = "application/json"
_PROBLEM = "application/problem+json"


def _parameter(name: str, where: str, rule: Any, text: str = "") -> dict[str, Any]:
    """A parameter whose schema is the rule that validates it."""
    shape = msgspec.json.schema(rule)
    described = text or shape.pop("description", "")
    found: dict[str, Any] = {"name": name, "in": where, "schema": shape}
    if where == "path":
        found["required"] = True
    return found | ({"description": described} if described else {})


_ENDPOINT = _parameter("id", "path", EndpointId)
_EVENT = _parameter("id", "path", EventId)
_DELIVERY = _parameter("id", "path", DeliveryId)
_TOPIC = _parameter("topic", "path", Topic)
_KEY = _parameter(
    "Idempotency-Key",
    "header",
    IdempotencyKey,
    "The same key with the same event is accepted once, and answered with the first event's id.",
)
_TEXTS = {
    "tenant": "For the operator's token: the tenant to act for. Others may only name their own.",
    "after": "`next` of the page before.",
    "since": "At this time or later.",
    "until": "Before this time.",
}


def _query(kind: type[msgspec.Struct]) -> tuple[dict[str, Any], ...]:
    """The query parameters that a Struct of optional fields validates."""
    found = []
    for field in msgspec.structs.fields(kind):
        rule = field.type
        members = [member for member in get_args(rule) if member is not type(None)]
        if get_origin(rule) in {UnionType, Union}:
            rule = members[0]
        found.append(_parameter(field.name, "query", rule, _TEXTS.get(field.name, "")))
    return tuple(found)


_REASONS = {
    400: "The request does not fit this description",
    401: "A valid bearer token is needed",
    403: "Not for this tenant",
    404: "There is none, or it is another tenant's",
    408: "The body did not come in time",
    409: "The state of things does not allow it",
    413: "The body is too long",
    415: "The body is not application/json",
    422: "Well-formed, but it cannot be done (`field` says what is wrong)",
    429: "The outbox is full, or a limit of the tenant is reached; see Retry-After",
    503: "The outbox cannot be used at the moment",
}


def _operation(
    name: str,
    summary: str,
    *,
    body: type | None = None,
    body_required: bool = True,
    answers: dict[int, type | None],
    errors: tuple[int, ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
    public: bool = False,
) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in answers.items():
        entry: dict[str, Any] = {"description": (kind.__doc__ or "").strip() if kind else "Done"}
        if kind is not None:
            entry["content"] = {_JSON: {"schema": _ref(kind)}}
        responses[str(status)] = entry
    always = () if public else (401, 503)
    for status in sorted({*errors, *always}):
        described: dict[str, Any] = {
            "description": _REASONS[status],
            "content": {_PROBLEM: {"schema": _ref(schema.Problem)}},
        }
        if status == 429:
            described["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
        responses[str(status)] = described
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = list(parameters)
    if body is not None:
        operation["requestBody"] = {"required": body_required, "content": {_JSON: {"schema": _ref(body)}}}
    if public:
        operation["security"] = []
    return operation


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


_TYPES = [
    schema.EndpointIn,
    schema.EndpointPatch,
    schema.EndpointOut,
    schema.EndpointCreated,
    schema.EndpointList,
    schema.SecretOut,
    schema.TestOut,
    schema.DeliveryOut,
    schema.DeliveryList,
    schema.ReplayIn,
    schema.ReplayOut,
    schema.RotateIn,
    schema.RetryIn,
    schema.RetryOut,
    schema.EventList,
    schema.AccountOut,
    schema.EventIn,
    schema.EventTypeIn,
    schema.EventTypeOut,
    schema.EventTypeList,
    schema.EventAccepted,
    schema.EventOut,
    schema.Health,
    schema.Problem,
]
_BODY = (400, 408, 413, 415, 422)


def _paths() -> dict[str, Any]:
    one = (_ENDPOINT,)
    return {
        "/endpoints": {
            "post": _operation(
                "createEndpoint",
                "Register an endpoint; its owner is asked at once",
                body=schema.EndpointIn,
                answers={201: schema.EndpointCreated},
                errors=(*_BODY, 403, 409, 429),
                parameters=_query(schema.TenantQuery),
            ),
            "get": _operation(
                "listEndpoints",
                "Endpoints by id",
                answers={200: schema.EndpointList},
                errors=(400, 403),
                parameters=_query(schema.EndpointsQuery),
            ),
        },
        "/endpoints/{id}": {
            "parameters": list(one),
            "get": _operation(
                "getEndpoint", "One endpoint", answers={200: schema.EndpointOut}, errors=(404,)
            ),
            "patch": _operation(
                "changeEndpoint",
                "Change some fields; a new URL must agree again",
                body=schema.EndpointPatch,
                answers={200: schema.EndpointOut},
                errors=(*_BODY, 404, 409, 429),
            ),
            "delete": _operation(
                "deleteEndpoint",
                "Delete; what is pending for it is withdrawn",
                answers={204: None},
                errors=(404,),
            ),
        },
        "/endpoints/{id}/rotate-secret": {
            "parameters": list(one),
            "post": _operation(
                "rotateSecret",
                "A new secret (or your own); the old one signs along for a day",
                body=schema.RotateIn,
                body_required=False,
                answers={200: schema.SecretOut},
                errors=(*_BODY, 404),
            ),
        },
        "/endpoints/{id}/test": _post("testEndpoint", "Send a test event now", schema.TestOut, 409, 429),
        "/endpoints/{id}/enable": _post("enableEndpoint", "Enable again", schema.EndpointOut, 409, 429),
        "/endpoints/{id}/disable": _post("disableEndpoint", "Stop delivering to it", schema.EndpointOut, 409),
        "/endpoints/{id}/verify": _post("verifyEndpoint", "Ask the owner again now", schema.EndpointOut, 429),
        "/endpoints/{id}/deliveries": {
            "parameters": list(one),
            "get": _operation(
                "listDeliveries",
                "Deliveries with their attempts, newest first",
                answers={200: schema.DeliveryList},
                errors=(400, 404),
                parameters=_query(schema.EndpointDeliveriesQuery),
            ),
        },
        "/endpoints/{id}/replay": {
            "parameters": list(one),
            "post": _operation(
                "replay",
                "Send events of a time range again",
                body=schema.ReplayIn,
                answers={202: schema.ReplayOut, 200: schema.ReplayOut},
                errors=(*_BODY, 404, 409),
            ),
        },
        "/deliveries": {
            "get": _operation(
                "listAllDeliveries",
                "Deliveries of all endpoints, newest first",
                answers={200: schema.DeliveryList},
                errors=(400, 403, 404),
                parameters=_query(schema.DeliveriesQuery),
            ),
        },
        "/retries": {
            "post": _operation(
                "retryDeliveries",
                "Send several deliveries now, finished or pending",
                body=schema.RetryIn,
                answers={202: schema.RetryOut},
                errors=(*_BODY, 429),
            ),
        },
        "/deliveries/{id}": {
            "parameters": [_DELIVERY],
            "get": _operation(
                "getDelivery", "One delivery", answers={200: schema.DeliveryOut}, errors=(404,)
            ),
        },
        "/deliveries/{id}/retry": {
            "parameters": [_DELIVERY],
            "post": _operation(
                "retryDelivery",
                "Send a delivery now, finished or pending",
                answers={202: schema.DeliveryOut},
                errors=(404, 409, 429),
            ),
        },
        "/account": {
            "get": _operation(
                "account",
                "What was accepted and what became of it",
                answers={200: schema.AccountOut},
                errors=(400, 403),
                parameters=_query(schema.TenantQuery),
            ),
        },
        "/events": {
            "post": _operation(
                "publishEvent",
                "Publish an event; it is durable when this is answered",
                body=schema.EventIn,
                answers={202: schema.EventAccepted, 200: schema.EventAccepted},
                errors=(*_BODY, 403, 409, 429),
                parameters=(*_query(schema.TenantQuery), _KEY),
            ),
            "get": _operation(
                "listEvents",
                "Events without their data, newest first",
                answers={200: schema.EventList},
                errors=(400, 403, 404),
                parameters=_query(schema.EventsQuery),
            ),
        },
        "/events/{id}": {
            "parameters": [_EVENT],
            "get": _operation(
                "getEvent", "An event and its deliveries", answers={200: schema.EventOut}, errors=(404,)
            ),
        },
        "/event-types": {
            "get": _operation(
                "listEventTypes", "The catalogue of topics", answers={200: schema.EventTypeList}
            ),
        },
        "/event-types/{topic}": {
            "parameters": [_TOPIC],
            "get": _operation(
                "getEventType",
                "One topic of the catalogue",
                answers={200: schema.EventTypeOut},
                errors=(404,),
            ),
            "put": _operation(
                "setEventType",
                "Describe a topic, with the JSON Schema of its data (operator)",
                body=schema.EventTypeIn,
                answers={200: schema.EventTypeOut},
                errors=(*_BODY, 403, 404, 409),
            ),
            "delete": _operation(
                "deleteEventType",
                "Take a topic out of the catalogue (operator)",
                answers={204: None},
                errors=(403, 404),
            ),
        },
        "/healthz": {"get": _operation("health", "Lives", answers={200: schema.Health}, public=True)},
        "/readyz": {
            "get": _operation("ready", "Ready", answers={200: schema.Health}, errors=(503,), public=True)
        },
        "/metrics": {
            "get": _operation(
                "metrics", "Counters and gauges for Prometheus (operator)", answers={200: None}, errors=(403,)
            )
        },
    }


def _post(name: str, summary: str, kind: type, *errors: int) -> dict[str, Any]:
    operation = _operation(name, summary, answers={200: kind}, errors=(404, *errors))
    return {"parameters": [_ENDPOINT], "post": operation}


def _links(operations: dict[str, Any]) -> None:
    """Where an answer leads: the id of what was made is the path parameter of what can be done with it."""
    made = operations["/endpoints"]["post"]["responses"]["201"]
    made["links"] = {
        operation["operationId"]: {
            "operationId": operation["operationId"],
            "parameters": {"id": "$response.body#/id"},
        }
        for path, methods in operations.items()
        if path.startswith("/endpoints/{id}")
        for method, operation in methods.items()
        if method != "parameters"
    }
    shown = {"operationId": "getEvent", "parameters": {"id": "$response.body#/id"}}
    operations["/events"]["post"]["responses"]["202"]["links"] = {"getEvent": shown}


def document(server: str = "/") -> dict[str, Any]:
    """The whole document; `server` is the path that the app is mounted at."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    paths = _paths()
    _links(paths)
    shown = paths["/metrics"]["get"]["responses"]["200"]
    shown |= {"description": "Counters and gauges", "content": {"text/plain": {"schema": {"type": "string"}}}}
    # What types alone cannot say.
    schemas["EventIn"]["not"] = {"required": ["data", "data_base64"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "brokerless webhooks",
            "version": "1",
            "description": "Register endpoints, publish events, look after deliveries.",
        },
        "servers": [{"url": server or "/"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
