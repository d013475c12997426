/* A connection to the session's socket: frames of one version, each a packet of its own. No call waits or takes a lock;
   one thread at a time may use a connection. */
#pragma once

#include "platform/common.h"
#include "platform/frames.h"

struct frame_socket {
    int file; /* -1 while there is no connection */
    uint32_t serial;
};
#define FRAME_SOCKET_CLOSED {-1, 0}

/* False: nobody is there, or too many are waiting to get in. */
bool frame_socket_connect(struct frame_socket *connection, const char *path);

/* An agent that does not read its frames is as good as gone: false, and the connection is closed. */
bool frame_socket_send(struct frame_socket *connection, struct frame *frame);

/* 1: a frame; 0: none now; -1: the connection is over, or what came is no frame of this version. */
int frame_socket_receive(struct frame_socket *connection, struct frame *frame);

void frame_socket_close(struct frame_socket *connection);
