"""Examples: what each command's help ends with. A test parses every line."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "pack": (
        "headrace pack photos/ photos.hr",
        "headrace pack 'shards-{000..127}.tar' train.hr --workers 8",
        "headrace pack s3://bucket/train/ train.hr -O region=eu-central-1",
        "headrace pack photos/ small.hr --images short=512,quality=92",
        "headrace pack photos/ photos.hr --shuffle 1",
    ),
    "index": (
        "headrace index photos/ photos.hr",
        "headrace index train.parquet train.hr --column image --label class",
    ),
    "tokenize": ("headrace tokenize texts.jsonl tokens.hr --tokenizer tokenizer.json --eos '</s>'",),
    "append": ("headrace append more/ photos.hr",),
    "info": ("headrace info photos.hr", "headrace info photos.hr --json"),
    "read": (
        "headrace read photos.hr --batch-size 256 --seconds 10",
        "headrace read --mix web=web.hr:0.7 --mix code=code.hr:0.3",
    ),
    "verify": ("headrace verify photos.hr --workers 8", "headrace verify photos.hr --decode"),
    "repair": ("headrace repair photos.hr",),
    "ls": ("headrace ls photos.hr 'cat/*' --limit 20",),
    "cat": (
        "headrace cat photos.hr 17 >17.jpg",
        "headrace cat photos.hr cat/1.jpg --name --force",
    ),
    "cache ls": ("headrace cache ls /local/cache",),
    "cache rm": ("headrace cache rm /local/cache --all",),
    "demo": ("headrace demo", "headrace demo --data photos/ --epochs 2"),
    "init": ("headrace init --list", "headrace init training --recipe ddp"),
    "run": (
        "headrace run python train.py",
        "headrace run --root /data/photos --seed 7 python train.py --epochs 90",
    ),
    "launch": (
        "headrace launch train.py --epochs 90",
        "headrace launch --stage /lustre/train.hr train.py --data headrace://job",
    ),
    "mount": ("headrace mount photos.hr /tmp/photos",),
    "unmount": ("headrace unmount /tmp/photos",),
    "doctor": (
        "headrace doctor photos/",
        "headrace doctor photos/ --step-ms 120 --workers 8 --html doctor.html",
    ),
    "report": ("headrace report runs/latest --html report.html",),
    "top": ("headrace top", "headrace top --once"),
    "bench run": (
        "headrace bench run workload=unet3d_h100 ++workload.workflow.generate_data=True",
        "headrace bench run --workload unet3d_h100 --accelerators 4 --cold",
    ),
    "bench generate": ("headrace bench generate workload=resnet50_h100 --threads 8",),
    "bench sweep": ("headrace bench sweep unet3d_h100 --accelerators 1..4",),
    "bench storage": ("headrace bench storage /mnt/data --seconds 5",),
    "bench report": ("headrace bench report hydra_log/unet3d --html -o report.html",),
    "bench compare": (
        "headrace bench compare before/ after/",
        "headrace bench compare job.yaml emulated.yaml --html compared.html",
    ),
    "bench trace": ("headrace bench trace hydra_log/unet3d -o trace.json",),
    "bench workloads": ("headrace bench workloads",),
    "record": (
        "headrace record -o job.yaml python train.py",
        "headrace record --finish job.yaml.part",
    ),
    "ab": (
        "headrace ab --repeat 5 python train.py",
        "headrace ab --seconds 60 --cold python train.py",
    ),
    "scaling": ("headrace scaling --project training/ --ranks 1,2,4",),
    "whatif": (
        "headrace whatif job.yaml --storage nfs --nodes 4",
        "headrace whatif runs/latest --gpu-speed 2x",
    ),
    "verify-epoch": ("headrace verify-epoch runs/latest",),
    "compare-runs": ("headrace compare-runs headrace-runs/17-0.json headrace-runs/18-0.json",),
    "cluster run": (
        "headrace cluster run --gpus 4",
        "headrace cluster run --gpus 4 -- srun python train.py",
    ),
    "cluster batch": ("headrace cluster batch --gpus 16 --time 8h train.sh",),
    "cluster queue": ("headrace cluster queue", "headrace cluster queue --watch 5"),
    "cluster status": ("headrace cluster status", "headrace cluster status 17 18_3 --json"),
    "cluster logs": ("headrace cluster logs 17 --follow", "headrace cluster logs 18_3 --lines 50"),
    "cluster cancel": ("headrace cluster cancel 17 18_3",),
    "cluster wait": ("headrace cluster wait 17 18 && echo done",),
    "cluster resubmit": ("headrace cluster resubmit 17", "headrace cluster resubmit 18_3"),
    "cluster init": ("headrace cluster init", "headrace cluster init --ondemand apps/"),
    "agent start": ("headrace agent start --metrics 9466",),
    "agent stop": ("headrace agent stop",),
    "agent status": ("headrace agent status",),
    "agent logs": ("headrace agent logs --lines 50",),
    "web": ("headrace web --demo", "headrace web --store photos.hr --run runs/latest"),
    "starving": ("headrace starving --last 7d --top 10",),
    "usage": ("headrace usage --last 30d --user ada",),
    "job-report": ("headrace job-report 4711",),
    "grafana export": ("headrace grafana export --output dashboard.json",),
    "grafana alerts": ("headrace grafana alerts --output alerts.yaml",),
    "node start": ("headrace node start --ram 64GiB", "headrace node start --foreground"),
    "node stop": ("headrace node stop",),
    "node status": ("headrace node status --json",),
    "node logs": ("headrace node logs --lines 50",),
    "node unit": ("headrace node unit >headrace-node.service",),
    "stage": ("headrace stage /lustre/train.hr --local /nvme/headrace --meet /lustre/job-17",),
    "export": ("headrace export photos.hr --listen 0.0.0.0:4420 --digests",),
    "job": ("headrace job --meet /lustre/job-17",),
    "image": ("headrace image photos.hr photos.img",),
    "control start": ("headrace control start --metrics 9465",),
    "control stop": ("headrace control stop",),
    "control status": ("headrace control status",),
    "control logs": ("headrace control logs",),
    "policy apply": ("headrace policy apply policy.yaml",),
    "policy diff": ("headrace policy diff policy.yaml",),
    "policy get": ("headrace policy get",),
    "config": ("headrace config --cflags --libs",),
    "version": ("headrace version --json",),
}  # fmt: skip
"""By the words of the command."""


def epilog(words: str) -> str:
    """The examples as the end of a help text, their lines kept as they are."""
    lines = "\n".join(f"  {example}" for example in EXAMPLES[words])
    return f"Examples:\n\n\b\n{lines}"
