"""What a Kubernetes cluster is given to train on several nodes: the files of a Job, a JobSet or a Kubeflow TrainJob.

`python -m ddp_lab.kubernetes --kind job --nnodes 2 digits` prints them, and talks to no cluster. The three kinds differ
in what surrounds the pods; the pods themselves stand once, in templates/pod.yaml.
"""
