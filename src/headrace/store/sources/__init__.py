"""What can be packed and indexed: folders, tar, TFRecord, npy and npz, iterables. One file each."""
