"""The files of a lab's Slurm. Pure: text from a spec."""

from pathlib import Path

from crosstraffic.slurm.lab.network import CONTROLLER, PORT, address
from crosstraffic.slurm.lab.spec import LabSpec

CONTROL_PORT, NODE_PORT = 16817, 16818
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"  # without it slurmd 22.05 looks for cgroups and stops

# Nodes of a lab share one kernel: a transport that looks would find shared memory between them. Slurm exports what a
# task prolog prints. MPICH takes libfabric: its UCX publishes more than the 1024 bytes a line that Slurm 22.05 reads of
# PMI-1 (uninitialised memory behind the address), and ranks then fail in MPI_Init now and then.
TASK_PROLOG = f"""#!/bin/sh
echo export MPIR_CVAR_CH4_NETMOD=ofi
echo export FI_PROVIDER=tcp
echo export FI_TCP_IFACE={PORT}
echo export UCX_TLS=tcp,self
echo export UCX_NET_DEVICES={PORT}
echo export GLOO_SOCKET_IFNAME={PORT}
echo export NCCL_SOCKET_IFNAME={PORT}
"""


def slurm_conf(spec: LabSpec, folder: Path, memory_mib: int) -> str:
    """Return slurm.conf: a controller of its own ports and key, a node for each namespace, one partition."""
    lines = [
        "ClusterName=lab",
        f"SlurmctldHost=ctl({CONTROLLER})",
        f"SlurmctldPort={CONTROL_PORT}",
        f"SlurmdPort={NODE_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        "CredType=cred/munge",
        "MpiDefault=none",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        "SlurmdParameters=config_overrides",  # more processors a node than the machine has
        f"TaskProlog={folder}/task_prolog",
        "ReturnToService=2",
        "SlurmdTimeout=20",
        "KillWait=5",
        "MinJobAge=86400",
    ]
    lines += [
        f"NodeName={node} NodeAddr={address(node)} CPUs={spec.ranks_per_node} RealMemory={memory_mib} State=UNKNOWN"
        for node in spec.nodes
    ]
    lines.append("PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
    return "\n".join(lines) + "\n"


def hosts(spec: LabSpec) -> str:
    """Return /etc/hosts as a node sees it."""
    lines = ["127.0.0.1 localhost", f"{CONTROLLER} ctl", *(f"{address(node)} {node}" for node in spec.nodes)]
    return "\n".join(lines) + "\n"
