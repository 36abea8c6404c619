"""Simulations of private federated training: cohorts, participation timers, training loop."""

from mf_aggregators import moved_modules

# Names of modules that earlier versions documented.
moved_modules.install(
    {
        "simulations.client_data": "simulations.training.client_data",
        "simulations.federated_runs": "simulations.runs.federated_runs",
        "simulations.federated_task": "simulations.training.federated_task",
        "simulations.learning_rate_schedules": "simulations.training.learning_rate_schedules",
        "simulations.remote_workers": "simulations.workers.remote_workers",
    }
)
