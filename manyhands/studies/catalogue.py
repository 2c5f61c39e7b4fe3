"""Every study by name."""

from manyhands.studies import curves, gradients, rates
from manyhands.studies.study import Study

STUDIES = {
    "timing-vs-size": Study("downpour", "comms, gradient and latency against model size", rates.timing),
    "serial-vs-workers": Study("downpour", "Snake's reward over time, serial and with workers", curves.serial_or_workers),
    "environments-sweep": Study("paac", "learning with more environments and a rate that grows with them", curves.environments),
    "time-usage": Study("paac", "where the time goes, with both networks", rates.time_usage),
    "datapoints-vs-width": Study("ba3c", "steps per second against the network's width", rates.widths),
    "datapoints-vs-shards": Study("ba3c", "steps per second against parameter servers", rates.shards),
    "sync-vs-async": Study("ba3c", "the first K of n gradients, or each on arrival", curves.synchronous_or_not),
    "speedup-vs-workers": Study("ba3c", "steps per second with more learners, measured and predicted", rates.speedup),
    "staleness": Study("ba3c", "how stale gradients are with more learners", curves.staleness),
    "adam-epsilon": Study("ba3c", "learning with other ε in Adam", curves.adam_epsilon),
    "learning-rate": Study("ba3c", "learning with other rates", curves.learning_rate),
    "batch-size": Study("accelerated", "learning in larger batches", curves.batch_sizes),
    "gradient-saturation": Study("accelerated", "what half of a batch says about the whole", gradients.saturation),
    "update-norms": Study("accelerated", "norms of parameters, gradients and steps, layer by layer", gradients.norms),
    "secondary-learner": Study("accelerated", "a second learner on the first one's replay", gradients.secondary),
    "simulators-per-core": Study("accelerated", "sampling speed against simulators for each core", rates.simulators),
    "appo-sync-period": Study("accelerated", "updates between synchronisations of asynchronous PPO", curves.sync_period),
}
