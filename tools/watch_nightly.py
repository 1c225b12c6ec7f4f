"""Make Prefect tell a webhook of the first red night of every nightly deployment.

    python tools/watch_nightly.py https://example.org/hook [--header 'Authorization: Bearer ...']

Creates or replaces the webhook's block and the automation of `automations/first-red-night.yaml` on
the server that `PREFECT_API_URL` names, and arms it for each nightly deployment that is there. Run
it again after a new nightly was deployed.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter
from prefect.events.schemas.automations import AutomationCore

FILE = Path(__file__).resolve().parents[1] / "automations" / "first-red-night.yaml"
BLOCK = "first-red-night"
FLOW = "nightly"
ARMED = "lockstep.nightly.armed"


def main() -> None:
    """Create block and automation, and arm it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="where to post")
    parser.add_argument("--header", action="append", default=[], help="NAME: VALUE; repeatable")
    arguments = parser.parse_args()
    headers = dict(header.split(": ", 1) for header in arguments.header)
    block_id = Webhook(url=arguments.url, headers=headers).save(BLOCK, overwrite=True)
    with get_client(sync_client=True) as client:
        automation_id = replace_automation(client, block_id)
        armed = arm(client)
    print(f"automation {automation_id} posts to {arguments.url}")
    print(f"armed for: {', '.join(armed) or 'no deployment yet; deploy, then run this again'}")


def replace_automation(client: SyncPrefectClient, block_id: UUID) -> UUID:
    """Create the shipped automation with this block; an older one of its name is deleted."""
    values = yaml.safe_load(
        FILE.read_text(encoding="utf-8").replace("WEBHOOK_BLOCK", str(block_id))
    )
    for older in client.read_automations_by_name(values["name"]):
        client.delete_automation(older.id)
    return client.create_automation(AutomationCore.model_validate(values))


def arm(client: SyncPrefectClient) -> Sequence[str]:
    """Say for each nightly deployment that its next red night is the first; return their names."""
    events: list[dict[str, Any]] = []
    names = []
    for deployment in client.read_deployments(flow_filter=FlowFilter(name={"any_": [FLOW]})):
        names.append(f"{FLOW}/{deployment.name}")
        events.append(
            {
                "id": str(uuid.uuid4()),
                "occurred": datetime.now(UTC).isoformat(),
                "event": ARMED,
                "resource": {"prefect.resource.id": f"lockstep.nightly.{deployment.id}"},
                "related": [
                    {
                        "prefect.resource.id": f"prefect.flow.{deployment.flow_id}",
                        "prefect.resource.role": "flow",
                        "prefect.resource.name": FLOW,
                    },
                    {
                        "prefect.resource.id": f"prefect.deployment.{deployment.id}",
                        "prefect.resource.role": "deployment",
                        "prefect.resource.name": deployment.name,
                    },
                ],
            }
        )
    if events:
        client.request("POST", "/events", json=events).raise_for_status()
    return names


if __name__ == "__main__":
    main()
