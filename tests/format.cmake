dcp_test(format archive_writer format PkgConfig::ZSTD)
dcp_test(format pickle_writer format PkgConfig::ZSTD)
