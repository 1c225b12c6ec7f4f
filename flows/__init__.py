"""Flows compose tasks. Importing them switches the telemetry of all packages off."""

import os

from engines.environment import telemetry_off_env

for _name, _value in telemetry_off_env().items():
    os.environ.setdefault(_name, _value)
