"""Simulated: what the commands of a cluster would print that nobody has here: 5,000 nodes and 50,000 jobs.

A simulation, in the form of 22.05's `scontrol --details show`, made from a seed: three jobs in ten run, on
whole or parts of nodes with eight GPUs, the others wait for one reason or another. Figures taken from it are
labelled so.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from headrace.cluster.notation import compress_hosts
from headrace.cluster.slurm.scontrol import snapshot_of

if TYPE_CHECKING:
    from headrace.cluster.snapshot import ClusterSnapshot

TAKEN_S = 1795332994.0
GPUS = 8
CPUS = 64

_NODE = """NodeName={name} Arch=x86_64 CoresPerSocket=32 
   CPUAlloc={cpus} CPUEfctv=64 CPUTot=64 CPULoad={load:.2f}
   AvailableFeatures=h100,rack{rack}
   ActiveFeatures=h100,rack{rack}
   Gres=gpu:h100:8(S:0-1)
   GresDrain=N/A
   GresUsed=gpu:h100:{gpus}(IDX:{indices})
   NodeAddr={name} NodeHostName={name} Version=22.05.8
   OS=Linux 5.14.0 #1 SMP 
   RealMemory=1030000 AllocMem={memory} FreeMem=512000 Sockets=2 Boards=1
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions={partitions} 
   BootTime=1795292622 SlurmdStartTime=1795332993
   LastBusyTime=1795332994
   CfgTRES=cpu=64,mem=1030000M,billing=64,gres/gpu=8
   AllocTRES=cpu={cpus},mem={memory}M,gres/gpu={gpus}
   CapWatts=n/a
   CurrentWatts=0 AveWatts=0
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s

"""  # noqa: W291 - as scontrol prints it

_JOB = """JobId={id} {array}JobName={name}
   UserId={user}({uid}) GroupId=users(100) MCS_label=N/A
   Priority={priority} Nice=0 Account={account} QOS=normal
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   DerivedExitCode=0:0
   RunTime=00:00:03 TimeLimit=1-00:00:00 TimeMin=N/A
   SubmitTime={submitted} EligibleTime={submitted}
   AccrueTime={submitted}
   StartTime={started} EndTime=Unknown Deadline=N/A
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=1795332994 Scheduler=Backfill
   Partition={partition} AllocNode:Sid=login1:14797
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList={nodes}
{batch}   NumNodes={count} NumCPUs={cpus} NumTasks={count} CPUs/Task=8 ReqB:S:C:T=0:0:*:*
   TRES=cpu={cpus},mem={memory}M,node={count},billing={cpus},gres/gpu={gpus}
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
{details}   MinCPUsNode=8 MinMemoryCPU=8000M MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/{user}/projects/training/{name}.sbatch
   WorkDir=/home/{user}/projects/training
   StdErr=/home/{user}/projects/training/logs/{id}.out
   StdIn=/dev/null
   StdOut=/home/{user}/projects/training/logs/{id}.out
   Power=
   TresPerNode=gres:gpu:{per_node}
   

"""  # noqa: W293

_REASONS = ("Priority", "Resources", "QOSMaxGRESPerUser", "Dependency", "AssocGrpGRES", "BeginTime")

PARTITIONS = """PartitionName=gpu
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=YES QoS=N/A
   DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes={all}
   State=UP TotalCPUs=320000 TotalNodes=5000 SelectTypeParameters=NONE
   JobDefaults=(null)
   DefMemPerCPU=8000 MaxMemPerNode=UNLIMITED

"""


def simulated_cluster(nodes: int = 5000, jobs: int = 50_000, seed: int = 7) -> ClusterSnapshot:
    """What is read of all that the commands would print."""
    chance = random.Random(seed)
    names = [f"gpu{i:04d}" for i in range(nodes)]
    free = [list(range(GPUS)) for _ in names]
    written = []
    at = 0
    for i in range(jobs):
        wanted = chance.choice((1, 1, 2, 4, 8))
        count = chance.choice((1, 1, 1, 1, 2, 4)) if wanted == GPUS else 1
        runs = i < 3 * jobs // 10 and at + count < nodes
        facts = {
            "id": 100_000 + i, "array": "", "name": f"train-{i % 977}", "user": f"user{i % 313}",
            "uid": 1000 + i % 313, "account": f"lab{i % 41}", "priority": 1000 + i,
            "submitted": int(TAKEN_S) - chance.randrange(90_000),
            "partition": "gpu", "count": count, "cpus": 8 * wanted * count, "memory": 64_000 * wanted * count,
            "gpus": wanted * count, "per_node": wanted,
        }  # fmt: skip
        if runs:
            while count == 1 and len(free[at]) < wanted:
                at += 1
            if count > 1:
                at += len(free[at]) < GPUS
            chosen = names[at : at + count]
            if at + count > nodes:
                runs = False
        if runs:
            indices = free[at][:wanted]
            for k in range(at, at + count):
                free[k] = free[k][wanted:]
            at += count - 1
            span = f"{indices[0]}-{indices[-1]}" if wanted > 1 else f"{indices[0]}"
            cpu_ids = f"{8 * indices[0]}-{8 * indices[-1] + 7}"
            hosts = compress_hosts(chosen)
            facts |= {
                "state": "RUNNING", "reason": "None", "started": int(TAKEN_S) - 3600, "nodes": hosts,
                "batch": f"   BatchHost={chosen[0]}\n",
                "details": f"   JOB_GRES=gpu:h100:{wanted * count}\n     Nodes={hosts} CPU_IDs={cpu_ids} "
                f"Mem={64_000 * wanted} GRES=gpu:h100:{wanted}(IDX:{span})\n",
            }  # fmt: skip
        else:
            started = int(TAKEN_S) + 60 * i if i % 5 == 0 else "Unknown"
            facts |= {"state": "PENDING", "reason": chance.choice(_REASONS), "started": started,
                      "nodes": "", "batch": "", "details": ""}  # fmt: skip
        written.append(_JOB.format(**facts))
    return snapshot_of(
        nodes="".join(
            _node(i, name, left) for i, (name, left) in enumerate(zip(names, free, strict=True))
        ),
        jobs="".join(written),
        partitions=PARTITIONS.format(all=compress_hosts(names)),
        config="ClusterName             = simulated\nSLURM_VERSION           = 22.05.8\n",
        taken_s=TAKEN_S,
    )


def _node(i: int, name: str, left: list[int]) -> str:
    used = GPUS - len(left)
    state = (
        "DOWN*+DRAIN"
        if i % 499 == 498
        else "ALLOCATED"
        if used == GPUS
        else "MIXED"
        if used
        else "IDLE"
    )
    return _NODE.format(
        name=name, cpus=8 * used, load=7.5 * used, rack=i // 32, gpus=used,
        indices=f"0-{used - 1}" if used > 1 else "0" if used else "N/A", memory=64_000 * used, state=state,
        partitions="gpu",
    )  # fmt: skip
