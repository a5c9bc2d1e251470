dcp_test(format archive_writer format PkgConfig::ZSTD)
dcp_test(format pickle_writer format PkgConfig::ZSTD)
dcp_test(format safetensors format PkgConfig::CRYPTO)
dcp_test(format safetensors_writer format PkgConfig::CRYPTO)
