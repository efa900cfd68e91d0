"""The table of all flags of the job commands.

The commands, the config file, the checks and docs/cli.md read this one table. Defaults come from the
dataclasses in elasticcb/settings.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticcb.cli.kubernetes.options import KUBERNETES, KUBERNETES_OPTIONS
from elasticcb.cli.option import EVALUATE, PREDICT, TRAIN, TRAIN_AND_EVALUATE, Kind, Option
from elasticcb.predictions.formats import FORMATS
from elasticcb.settings import CallbackErrors, ClusterKind, Command, NonFinite, WhenFull, WireDtype

MODEL = "Model file"
DATA = "Data"
TRAINING = "Training"
TASKS = "Batches and tasks"
EMBEDDING = "Embedding tables"
CHECKPOINTS = "Checkpoints and export"
CLUSTER = "Cluster"
JOB = "Job"
PANELS = (MODEL, DATA, TRAINING, EMBEDDING, TASKS, CHECKPOINTS, CLUSTER, KUBERNETES, JOB)

OPTIONS: tuple[Option, ...] = (
    # ---------------------------------------------------------------- model file
    Option(
        name="model_zoo",
        field="model.zoo",
        panel=MODEL,
        kind=Kind.FOLDER,
        help="Folder that holds model files. Needed.",
    ),
    Option(
        name="model_def",
        field="model.definition",
        panel=MODEL,
        kind=Kind.TEXT,
        value="FOLDER.FILE.NAME",
        help="The model in the zoo: path of the file with dots, then the function that returns the Keras "
        "model, or the keras.Model subclass; e.g. mnist.custom_model. Needed.",
    ),
    Option(
        name="model_params",
        field="model.params",
        panel=MODEL,
        kind=Kind.PARAMS,
        help='Arguments for the function of --model_def, e.g. "units=64;rate=1e-3". Values are read as '
        "numbers, true, false or null where they look so, else as text.",
    ),
    Option(
        name="loss",
        field="model.loss",
        panel=MODEL,
        kind=Kind.NAME,
        help="Name of the loss function in the model file.",
        commands=TRAIN_AND_EVALUATE,
    ),
    Option(
        name="optimizer",
        field="model.optimizer",
        panel=MODEL,
        kind=Kind.NAME,
        help="Name of the function that returns the Keras optimizer.",
    ),
    Option(
        name="feed",
        field="model.feed",
        panel=MODEL,
        kind=Kind.NAME,
        help="Name of the function that turns raw records into features and labels.",
    ),
    Option(
        name="eval_metrics_fn",
        field="model.eval_metrics_fn",
        panel=MODEL,
        kind=Kind.NAME,
        help="Name of the function that returns the evaluation metrics.",
        commands=TRAIN_AND_EVALUATE,
    ),
    Option(
        name="callbacks",
        field="model.callbacks",
        panel=MODEL,
        kind=Kind.NAME,
        help="Name of the function that returns the list of Keras callbacks.",
    ),
    Option(
        name="custom_data_reader",
        field="model.custom_data_reader",
        panel=MODEL,
        kind=Kind.NAME,
        help="Name of the function that returns a data reader of your own.",
    ),
    # ---------------------------------------------------------------- data
    Option(
        name="training_data",
        field="data.training",
        panel=DATA,
        kind=Kind.DATA,
        help="Records to train on: a file, folder, glob, URL, or several of these with commas between; with "
        "a data reader of your own, whatever it understands. Needed.",
        commands=TRAIN,
    ),
    Option(
        name="validation_data",
        field="data.validation",
        panel=DATA,
        kind=Kind.DATA,
        help="Records to evaluate on. `evaluate` needs it; without it `train` runs no evaluation.",
        commands=TRAIN_AND_EVALUATE,
    ),
    Option(
        name="prediction_data",
        field="data.prediction",
        panel=DATA,
        kind=Kind.DATA,
        help="Records to predict. Needed.",
        commands=PREDICT,
    ),
    Option(
        name="data_reader_params",
        field="data.reader_params",
        panel=DATA,
        kind=Kind.PARAMS,
        help='Arguments for the data reader, e.g. "header=true;encoding=latin-1".',
    ),
    # ---------------------------------------------------------------- training
    Option(
        name="num_epochs",
        field="training.num_epochs",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="EPOCHS",
        minimum=1,
        help="Passes over the training data.",
        commands=TRAIN,
    ),
    Option(
        name="max_step",
        field="training.max_step",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="VERSIONS",
        minimum=0,
        help="Stop after so many model versions (gradient pushes taken); 0: no limit.",
        commands=TRAIN,
    ),
    Option(
        name="evaluation_steps",
        field="training.evaluation_steps",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="VERSIONS",
        minimum=0,
        help="Evaluate every so many model versions; 0: at the end of each epoch. The end of training is "
        "always evaluated.",
        commands=TRAIN,
    ),
    Option(
        name="use_async",
        field="training.use_async",
        panel=TRAINING,
        kind=Kind.TRUTH,
        help="true: each gradient is applied as it comes. false: synchronous, the mean of --grads_to_wait "
        "gradients is applied.",
        commands=TRAIN,
    ),
    Option(
        name="grads_to_wait",
        field="training.grads_to_wait",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="GRADIENTS",
        minimum=1,
        help="Synchronous mode: gradients per update; may be more than there are workers.",
        commands=TRAIN,
    ),
    Option(
        name="sync_version_tolerance",
        field="training.sync_version_tolerance",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="VERSIONS",
        minimum=0,
        help="Synchronous mode: how many versions old a gradient may be; older ones are computed again.",
        commands=TRAIN,
    ),
    Option(
        name="get_model_steps",
        field="training.get_model_steps",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="BATCHES",
        minimum=1,
        help="A worker fetches the weights every so many batches.",
        commands=TRAIN,
    ),
    Option(
        name="max_staleness",
        field="training.max_staleness",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="BATCHES",
        minimum=0,
        help="Asynchronous mode: how many batches a worker may compute ahead of the servers' answers, so that pushes "
        "and pulls run beside the computation; 0: strictly pull, compute, push.",
        commands=TRAIN,
    ),
    Option(
        name="wire_dtype",
        field="training.wire_dtype",
        panel=TRAINING,
        kind=Kind.CHOICE,
        choices=tuple(choice.value for choice in WireDtype),
        help="How gradients travel: as they are, or those of float32 rounded to bfloat16.",
        commands=TRAIN,
    ),
    Option(
        name="non_finite",
        field="training.non_finite",
        panel=TRAINING,
        kind=Kind.CHOICE,
        choices=tuple(choice.value for choice in NonFinite),
        help="When a loss or a gradient holds NaN or infinity: stop the job, or skip and count the batch.",
        commands=TRAIN,
    ),
    Option(
        name="callback_errors",
        field="training.callback_errors",
        panel=JOB,
        kind=Kind.CHOICE,
        choices=tuple(choice.value for choice in CallbackErrors),
        help="When a hook of a callback raises: stop the job, or show the error once, count it and go on.",
    ),
    Option(
        name="shuffle_seed",
        field="training.shuffle_seed",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="SEED",
        help="Seed of the order of tasks in each epoch.",
        commands=TRAIN,
    ),
    Option(
        name="log_loss_steps",
        field="training.log_loss_steps",
        panel=TRAINING,
        kind=Kind.INTEGER,
        value="VERSIONS",
        minimum=0,
        help="Log the loss every so many model versions; 0: never.",
        commands=TRAIN,
    ),
    # ---------------------------------------------------------------- embedding tables
    Option(
        name="embedding_threshold_bytes",
        field="embedding.threshold_bytes",
        panel=EMBEDDING,
        kind=Kind.INTEGER,
        value="BYTES",
        minimum=0,
        help="The rows of a keras.layers.Embedding of at least so many bytes live on the servers, and only those that "
        "a batch needs travel.",
    ),
    Option(
        name="embedding_memory_bytes",
        field="embedding.memory_bytes",
        panel=EMBEDDING,
        kind=Kind.INTEGER,
        value="BYTES",
        minimum=0,
        help="What the embedding tables of one parameter server may hold, with the optimizer's slots; 0: no limit.",
        commands=TRAIN,
    ),
    Option(
        name="embedding_when_full",
        field="embedding.when_full",
        panel=EMBEDDING,
        kind=Kind.CHOICE,
        choices=tuple(choice.value for choice in WhenFull),
        help="When that is reached: the job fails, the rows that were not used for longest go, or new ids keep their "
        "initial value.",
        commands=TRAIN,
    ),
    Option(
        name="embedding_min_count",
        field="embedding.min_count",
        panel=EMBEDDING,
        kind=Kind.INTEGER,
        value="TIMES",
        minimum=1,
        help="An id of an elasticcb.layers.Embedding gets a row when training meets it for this time; until then it "
        "has its initial value.",
        commands=TRAIN,
    ),
    Option(
        name="embedding_max_age",
        field="embedding.max_age",
        panel=EMBEDDING,
        kind=Kind.INTEGER,
        value="VERSIONS",
        minimum=0,
        help="Rows of an elasticcb.layers.Embedding that training did not meet for so many versions go; 0: never.",
        commands=TRAIN,
    ),
    # ---------------------------------------------------------------- batches and tasks
    Option(
        name="minibatch_size",
        field="training.minibatch_size",
        panel=TASKS,
        kind=Kind.INTEGER,
        value="RECORDS",
        minimum=1,
        help="Records per batch.",
    ),
    Option(
        name="num_minibatches_per_task",
        field="training.num_minibatches_per_task",
        panel=TASKS,
        kind=Kind.INTEGER,
        value="BATCHES",
        minimum=1,
        help="Batches per task, the unit that a worker takes and that is done again after a failure.",
    ),
    Option(
        name="max_task_retries",
        field="training.max_task_retries",
        panel=TASKS,
        kind=Kind.INTEGER,
        value="TIMES",
        minimum=0,
        help="How often a failed task is tried again before the job fails.",
    ),
    Option(
        name="lease_seconds",
        field="training.lease_seconds",
        panel=TASKS,
        kind=Kind.NUMBER,
        value="SECONDS",
        above=0,
        help="A task without progress for so long is taken from its worker and given to another; while a batch is "
        "computed, after 12 times as long.",
    ),
    # ---------------------------------------------------------------- checkpoints and export
    Option(
        name="checkpoint_dir",
        field="checkpoint.directory",
        panel=CHECKPOINTS,
        kind=Kind.FOLDER,
        help="Folder to write checkpoints to, or its URL (s3://, gs://, sftp://, …); without it none are written.",
        commands=TRAIN,
    ),
    Option(
        name="checkpoint_steps",
        field="checkpoint.steps",
        panel=CHECKPOINTS,
        kind=Kind.INTEGER,
        value="VERSIONS",
        minimum=0,
        help="Write a checkpoint every so many model versions; 0: only at the end.",
        commands=TRAIN,
    ),
    Option(
        name="checkpoint_interval",
        field="checkpoint.interval_seconds",
        panel=CHECKPOINTS,
        kind=Kind.NUMBER,
        value="SECONDS",
        minimum=0,
        help="Parameter servers write down what changed every so many seconds, in the job's folder; one that is "
        "killed comes back with that. 0: never, and a lost server ends the job.",
        commands=TRAIN,
    ),
    Option(
        name="keep_checkpoint_max",
        field="checkpoint.keep_max",
        panel=CHECKPOINTS,
        kind=Kind.INTEGER,
        value="CHECKPOINTS",
        minimum=0,
        help="Keep the newest so many checkpoints; 0: all.",
        commands=TRAIN,
    ),
    Option(
        name="checkpoint_dir_for_init",
        field="checkpoint.directory_for_init",
        panel=CHECKPOINTS,
        kind=Kind.FOLDER,
        help="Start from the newest checkpoint in this folder or URL, or from this very checkpoint. `evaluate` and "
        "`predict` need it.",
    ),
    Option(
        name="follow",
        field="follow.enabled",
        panel=CHECKPOINTS,
        kind=Kind.TRUTH,
        help="Evaluate each checkpoint in --checkpoint_dir_for_init, then each new one as it comes. `--follow` "
        "alone is true.",
        commands=EVALUATE,
    ),
    Option(
        name="follow_timeout",
        field="follow.timeout",
        panel=CHECKPOINTS,
        kind=Kind.NUMBER,
        value="SECONDS",
        minimum=0,
        help="With --follow: end after so long without a new checkpoint; 0: no limit.",
        commands=EVALUATE,
    ),
    Option(
        name="max_evaluations",
        field="follow.max_evaluations",
        panel=CHECKPOINTS,
        kind=Kind.INTEGER,
        value="CHECKPOINTS",
        minimum=0,
        help="With --follow: end after so many checkpoints; 0: no limit.",
        commands=EVALUATE,
    ),
    Option(
        name="output",
        field="output",
        panel=CHECKPOINTS,
        kind=Kind.FOLDER,
        value="PATH",
        help="`train`: folder of the exported SavedModel; without it nothing is exported. An earlier SavedModel there "
        "is replaced. `predict`: file of the predictions, a new one.",
        commands=TRAIN | PREDICT,
    ),
    Option(
        name="output_format",
        field="output_format",
        panel=CHECKPOINTS,
        kind=Kind.CHOICE,
        choices=FORMATS,
        default_text="by the ending of --output",
        help="Format of the predictions: CSV, JSON lines, Parquet (needs pyarrow) or NumPy.",
        commands=PREDICT,
    ),
    # ---------------------------------------------------------------- cluster
    Option(
        name="cluster",
        field="cluster.kind",
        panel=CLUSTER,
        kind=Kind.CHOICE,
        choices=tuple(choice.value for choice in ClusterKind),
        help="local: processes on this machine. inprocess: threads of one process, for breakpoints. "
        "external: you start the processes, anywhere. kubernetes: as pods. ray: on the nodes of a Ray cluster.",
    ),
    Option(
        name="ray_address",
        field="cluster.ray_address",
        panel=CLUSTER,
        kind=Kind.TEXT,
        value="HOST:PORT",
        default_text="RAY_ADDRESS, or the cluster of this machine",
        help="With --cluster=ray: which Ray cluster. The command must run on one of its nodes.",
    ),
    Option(
        name="num_workers",
        field="cluster.num_workers",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PROCESSES",
        minimum=1,
        because="Workers are what runs the batches.",
        help="Workers.",
    ),
    Option(
        name="autoscale",
        field="cluster.autoscale",
        panel=CLUSTER,
        kind=Kind.TEXT,
        value="MIN..MAX",
        help="Add workers while the throughput grows by it, and give back those that don't help: as 1..8. The job "
        "begins with --num_workers, or MIN.",
        commands=TRAIN,
    ),
    Option(
        name="num_ps",
        field="cluster.num_ps",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PROCESSES",
        minimum=1,
        because="The weights live on the parameter servers.",
        aliases=("num_ps_pods",),
        help="Parameter servers.",
    ),
    Option(
        name="ps_replicas",
        field="cluster.ps_replicas",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="REPLICAS",
        minimum=0,
        maximum=1,
        help="1: each parameter server hands its updates to the next one before it answers, so that one that is "
        "killed loses none; needs at least 2.",
        commands=TRAIN,
    ),
    Option(
        name="host",
        field="cluster.host",
        panel=CLUSTER,
        kind=Kind.TEXT,
        value="ADDRESS",
        default_text="127.0.0.1; with --cluster=ray its node's",
        help="Address that the master listens on; one that the other machines reach, with --cluster=external.",
    ),
    Option(
        name="port",
        field="cluster.port",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PORT",
        minimum=0,
        maximum=65535,
        help="Port of the master; 0: any that is free.",
    ),
    Option(
        name="metrics_port",
        field="cluster.metrics_port",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PORT",
        minimum=0,
        maximum=65535,
        default_text="none are served",
        help="Port on which the master serves metrics to Prometheus, by HTTP; 0: any that is free.",
    ),
    Option(
        name="health_port",
        field="cluster.health_port",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PORT",
        minimum=0,
        maximum=65535,
        default_text="none are answered",
        help="Port on which the master answers gRPC health checks, as Kubernetes makes them; 0: any that is free.",
    ),
    Option(
        name="max_worker_restarts",
        field="cluster.max_worker_restarts",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PROCESSES",
        minimum=0,
        help="Workers that are started in the place of lost ones, over the whole job.",
    ),
    Option(
        name="max_ps_restarts",
        field="cluster.max_ps_restarts",
        panel=CLUSTER,
        kind=Kind.INTEGER,
        value="PROCESSES",
        minimum=0,
        help="Parameter servers that are started in the place of lost ones, over the whole job.",
    ),
    Option(
        name="silence_seconds",
        field="cluster.silence_seconds",
        panel=CLUSTER,
        kind=Kind.NUMBER,
        value="SECONDS",
        above=0,
        help="A parameter server that is not heard of for so long is replaced; with --cluster=external, a worker, too. "
        "A shorter --lease_seconds shortens it.",
    ),
    Option(
        name="tls",
        field="cluster.tls",
        panel=CLUSTER,
        kind=Kind.TRUTH,
        help="Encrypt what the processes say, and let in only those with a certificate of a CA that is made for this "
        "job (in `tls` in its folder). `--tls` alone is true.",
    ),
    Option(
        name="tls_cert",
        field="cluster.tls_cert",
        panel=CLUSTER,
        kind=Kind.FILE,
        help="The same with certificates of your own: a PEM file with this process's.",
    ),
    Option(
        name="tls_key",
        field="cluster.tls_key",
        panel=CLUSTER,
        kind=Kind.FILE,
        help="PEM file with its private key, without a password.",
    ),
    Option(
        name="tls_ca",
        field="cluster.tls_ca",
        panel=CLUSTER,
        kind=Kind.FILE,
        help="PEM file with the CA that has signed the certificates of all processes.",
    ),
    Option(
        name="tls_name",
        field="cluster.tls_name",
        panel=CLUSTER,
        kind=Kind.TEXT,
        value="NAME",
        default_text="the address that it listens on",
        help="What a server's certificate must be for: the same name in all of them.",
    ),
    *KUBERNETES_OPTIONS,
    # ---------------------------------------------------------------- job
    Option(
        name="job_name",
        field="name",
        panel=JOB,
        kind=Kind.TEXT,
        value="NAME",
        default_text="from --model_def",
        help="Name of the job, in logs and in the job's folder.",
    ),
    Option(
        name="job_dir",
        field="directory",
        panel=JOB,
        kind=Kind.FOLDER,
        default_text="jobs/COMMAND-NAME-TIME",
        help="Folder for the job's logs and results.",
    ),
    Option(
        name="log_level",
        field="log_level",
        panel=JOB,
        kind=Kind.CHOICE,
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="What is logged. DEBUG also shows the traceback of an error, as ELASTICCB_DEBUG=1 does.",
    ),
)

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
CANONICAL: dict[str, str] = {spelling: option.name for option in OPTIONS for spelling in (option.name, *option.aliases)}


def normalize(text: str) -> str:
    """`num-ps` and `num_ps` are one name."""
    return text.replace("-", "_")


def options_of(commands: Iterable[Command]) -> list[Option]:
    """The flags that mean something to any of `commands`, in the order of the panels."""
    wanted = frozenset(commands)
    found = [option for option in OPTIONS if option.commands & wanted]
    return sorted(found, key=lambda option: PANELS.index(option.panel))
