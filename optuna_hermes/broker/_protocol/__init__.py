"""Protocol of broker and clients: typed msgpack frames. Pure.

A frame is a length (4 bytes, big endian) and a msgpack map with the type's name under ``type``.
Every message about a lease carries its epoch, so that stale ones can be dropped.
"""

from optuna_hermes.broker._protocol._frames import HEADER_BYTES as HEADER_BYTES
from optuna_hermes.broker._protocol._frames import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from optuna_hermes.broker._protocol._frames import body_length as body_length
from optuna_hermes.broker._protocol._frames import decode_from_broker as decode_from_broker
from optuna_hermes.broker._protocol._frames import decode_from_client as decode_from_client
from optuna_hermes.broker._protocol._frames import frame as frame
from optuna_hermes.broker._protocol._from_broker import Accepted as Accepted
from optuna_hermes.broker._protocol._from_broker import CheckpointAck as CheckpointAck
from optuna_hermes.broker._protocol._from_broker import Dismiss as Dismiss
from optuna_hermes.broker._protocol._from_broker import FromBroker as FromBroker
from optuna_hermes.broker._protocol._from_broker import Grant as Grant
from optuna_hermes.broker._protocol._from_broker import LeaseEndAck as LeaseEndAck
from optuna_hermes.broker._protocol._from_broker import Move as Move
from optuna_hermes.broker._protocol._from_broker import Prepare as Prepare
from optuna_hermes.broker._protocol._from_broker import Refused as Refused
from optuna_hermes.broker._protocol._from_broker import ReportAck as ReportAck
from optuna_hermes.broker._protocol._from_broker import Resize as Resize
from optuna_hermes.broker._protocol._from_broker import SetUp as SetUp
from optuna_hermes.broker._protocol._from_broker import Status as Status
from optuna_hermes.broker._protocol._from_broker import StudyChanged as StudyChanged
from optuna_hermes.broker._protocol._from_broker import Welcome as Welcome
from optuna_hermes.broker._protocol._from_broker import Yield as Yield
from optuna_hermes.broker._protocol._from_client import Beat as Beat
from optuna_hermes.broker._protocol._from_client import Begin as Begin
from optuna_hermes.broker._protocol._from_client import ChangePolicy as ChangePolicy
from optuna_hermes.broker._protocol._from_client import Counted as Counted
from optuna_hermes.broker._protocol._from_client import Describe as Describe
from optuna_hermes.broker._protocol._from_client import Drain as Drain
from optuna_hermes.broker._protocol._from_client import Ended as Ended
from optuna_hermes.broker._protocol._from_client import Finish as Finish
from optuna_hermes.broker._protocol._from_client import Finished as Finished
from optuna_hermes.broker._protocol._from_client import FirstBatch as FirstBatch
from optuna_hermes.broker._protocol._from_client import FromClient as FromClient
from optuna_hermes.broker._protocol._from_client import GetStatus as GetStatus
from optuna_hermes.broker._protocol._from_client import GiveUp as GiveUp
from optuna_hermes.broker._protocol._from_client import Hello as Hello
from optuna_hermes.broker._protocol._from_client import KeepWorkers as KeepWorkers
from optuna_hermes.broker._protocol._from_client import OpenStudy as OpenStudy
from optuna_hermes.broker._protocol._from_client import Quit as Quit
from optuna_hermes.broker._protocol._from_client import Ready as Ready
from optuna_hermes.broker._protocol._from_client import Reattach as Reattach
from optuna_hermes.broker._protocol._from_client import Register as Register
from optuna_hermes.broker._protocol._from_client import Released as Released
from optuna_hermes.broker._protocol._from_client import Report as Report
from optuna_hermes.broker._protocol._from_client import Saved as Saved
from optuna_hermes.broker._protocol._from_client import SetOverrides as SetOverrides
from optuna_hermes.broker._protocol._from_client import TierChanged as TierChanged
from optuna_hermes.broker._protocol._from_client import UserCommand as UserCommand
from optuna_hermes.broker._protocol._from_client import WatchStudy as WatchStudy
from optuna_hermes.broker._protocol._status import BestTrial as BestTrial
from optuna_hermes.broker._protocol._status import BrokerStatus as BrokerStatus
from optuna_hermes.broker._protocol._status import DeviceStatus as DeviceStatus
from optuna_hermes.broker._protocol._status import FailureSummary as FailureSummary
from optuna_hermes.broker._protocol._status import HolderStatus as HolderStatus
from optuna_hermes.broker._protocol._status import HostMemory as HostMemory
from optuna_hermes.broker._protocol._status import ResidentStatus as ResidentStatus
from optuna_hermes.broker._protocol._status import StudyStatus as StudyStatus
from optuna_hermes.broker._protocol._status import TrialCounts as TrialCounts
from optuna_hermes.broker._protocol._status import TrialLoss as TrialLoss
from optuna_hermes.broker._protocol._status import TrialRow as TrialRow
from optuna_hermes.broker._protocol._status import WorkerCounts as WorkerCounts
from optuna_hermes.broker._protocol._values import Ending as Ending
from optuna_hermes.broker._protocol._values import Params as Params
from optuna_hermes.broker._protocol._values import StudySpec as StudySpec

VERSION = 24
