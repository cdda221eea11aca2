"""`/openapi.json` says what the routes take and answer: compared with them, and tried out on them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.checks import ignored_auth, negative_data_rejection, positive_data_acceptance
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from tokenspeed_jax.serve.access import ADMIN_PATHS
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.openapi import BODIES, describe
from tokenspeed_jax.serve.status_page.assets import PAGE_PATHS

from .fake_engine import FakeEngine

ADMIN_KEY = "admin"
QUICK, LONG = 3, 700
"""Examples per operation and kind of data."""
UNDECIDED = [positive_data_acceptance, negative_data_rejection, ignored_auth]
"""The schema has the types; ranges, and which fields go together, are in the documentation alone. Keys have tests of
their own."""


@pytest.fixture(scope="module")
def tried() -> Iterator[TestClient]:
    engine = FakeEngine()
    config = ServerConfig(admin_api_key=ADMIN_KEY, profiler_dir="unused")
    with TestClient(create_app(engine, config), raise_server_exceptions=False) as client:
        yield client
    engine.close()


@pytest.fixture(scope="module")
def document(tried: TestClient) -> dict[str, Any]:
    reply = tried.get("/openapi.json")
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


def test_every_route_is_described(tried: TestClient, document: dict[str, Any]) -> None:
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in tried.app.routes
        for method in route.methods - {"HEAD"}
        if route.path not in PAGE_PATHS
    }
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert described == served
    assert {path for path, method in served if method == "post"} == set(BODIES)
    assert all(operation["summary"] for operations in document["paths"].values() for operation in operations.values())


def test_every_field_of_a_body_is_described(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for kind in BODIES.values():
        described = schemas[kind.__name__]
        fields = {item.encode_name for item in msgspec.structs.fields(kind)} | set(getattr(kind, "neutral_fields", {}))
        assert set(described["properties"]) == fields
        assert described["additionalProperties"] is False


def test_route_that_nobody_described_fails_the_start() -> None:
    async def endpoint(_request: Request) -> Response:
        return Response()

    with pytest.raises(KeyError, match="/new"):
        describe([Route("/new", endpoint, methods=["POST"])])


def operations(document: dict[str, Any]) -> list[schemathesis.APIOperation]:
    return [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]


def try_out(tried: TestClient, document: dict[str, Any], examples: int, label: str | None) -> None:
    """Sends what the schema allows and what it forbids; no reply may be one that it does not have."""
    for operation in operations(document):
        if label not in (None, operation.label):
            continue
        # A reply is looked at by what its operation promises, whatever was sent.
        headers = {"authorization": f"Bearer {ADMIN_KEY}"} if operation.path in ADMIN_PATHS else {}
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 1 + (operation.method == "post")]:
            send_examples(tried, operation.as_strategy(mode), examples, headers)


def send_examples(tried: TestClient, cases: SearchStrategy, examples: int, headers: dict[str, str]) -> None:
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=examples == QUICK,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases)
    def answers(case: schemathesis.Case) -> None:
        sent = case.as_transport_kwargs(base_url="http://testserver")
        sent["headers"] = {**sent.get("headers", {}), **headers}
        sent.pop("cookies", None)
        case.validate_response(tried.request(**sent), excluded_checks=UNDECIDED)

    answers()


def test_replies_are_as_described(tried: TestClient, document: dict[str, Any]) -> None:
    try_out(tried, document, QUICK, None)


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(BODIES))
def test_replies_are_as_described_for_long(tried: TestClient, document: dict[str, Any], path: str) -> None:
    try_out(tried, document, LONG, f"POST {path}")
