/* A program outside the tree: opens the checkpoint given, prints the version of the library and the number of items. */
#include <dcp/dcp.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    dcp_error err = DCP_ERROR_INIT;
    dcp_checkpoint *ck;
    if (argc != 2) {
        return 2;
    }
    if (dcp_checkpoint_open(NULL, argv[1], NULL, &ck, &err) != DCP_OK) {
        fprintf(stderr, "%s: %s\n", dcp_status_name(err.code), err.message);
        return 1;
    }
    printf("libdcp %s: %zu items\n", dcp_version(), dcp_checkpoint_count(ck));
    dcp_checkpoint_close(ck);
    return 0;
}
