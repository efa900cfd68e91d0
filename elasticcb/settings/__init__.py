"""Settings: typed and frozen, in seconds and bytes. Each is defined once; every process receives all of them.

To add a setting, add a field to a section in job.py, training.py, cluster.py or kubernetes.py, and the line that reads
it. `Given` reads what a user gave: flags, a config file, or arguments of `Cluster`.
"""

from elasticcb.settings.choices import (
    MOST_WORKERS,
    CallbackErrors,
    Command,
    LostUpdates,
    Mode,
    NonFinite,
    RowsDtype,
    Updates,
    WhenFull,
    WireDtype,
    WorkerRange,
)
from elasticcb.settings.cluster import ClusterSettings, NetworkOptions, RecoveryOptions
from elasticcb.settings.given import Given
from elasticcb.settings.job import (
    FIT_FILE,
    FORK_LOG,
    HISTORY_FILE,
    INDEX_FILE,
    INITIAL_FOLDER,
    JOB_FILE,
    JOURNAL_FILE,
    JOURNALS,
    MODEL_FOLDER,
    RECOVERY_FOLDER,
    STATUS_FILE,
    CheckpointOptions,
    CheckpointSettings,
    DataSettings,
    ExportSettings,
    FollowSettings,
    JobSettings,
    ModelSettings,
    SubmissionSettings,
)
from elasticcb.settings.kubernetes import KubernetesSettings
from elasticcb.settings.names import written
from elasticcb.settings.training import EmbeddingOptions, ExchangeOptions, TrainingSettings

__all__ = [
    "FIT_FILE",
    "FORK_LOG",
    "HISTORY_FILE",
    "INDEX_FILE",
    "INITIAL_FOLDER",
    "JOB_FILE",
    "JOURNALS",
    "JOURNAL_FILE",
    "MODEL_FOLDER",
    "MOST_WORKERS",
    "RECOVERY_FOLDER",
    "STATUS_FILE",
    "CallbackErrors",
    "CheckpointOptions",
    "CheckpointSettings",
    "ClusterSettings",
    "Command",
    "DataSettings",
    "EmbeddingOptions",
    "ExchangeOptions",
    "ExportSettings",
    "FollowSettings",
    "Given",
    "JobSettings",
    "KubernetesSettings",
    "LostUpdates",
    "Mode",
    "ModelSettings",
    "NetworkOptions",
    "NonFinite",
    "RecoveryOptions",
    "RowsDtype",
    "SubmissionSettings",
    "TrainingSettings",
    "Updates",
    "WhenFull",
    "WireDtype",
    "WorkerRange",
    "written",
]
